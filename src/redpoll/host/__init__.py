"""The processes of a node: started, watched, stopped."""
