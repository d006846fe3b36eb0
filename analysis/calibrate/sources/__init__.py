"""Where `confsim fit` takes measurements from, one file per source."""
