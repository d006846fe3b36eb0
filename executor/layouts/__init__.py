"""How an iteration runs on each arrangement of ranks; all of them are made of the same parts."""
