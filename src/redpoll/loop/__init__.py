"""What every event loop needs so that nobody waits long: slices, room in a socket, the lag."""
