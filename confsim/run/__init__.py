"""The run of one replay: requests, plans, backends, timelines, the event loop."""
