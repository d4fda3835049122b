"""pusher-js' HTTP transports: sessions that are connections without a socket of their own."""
