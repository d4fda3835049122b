"""The management API: apps over HTTP, with a token of the scope `manage`."""
