"""The Pusher protocol as redpoll speaks it; README.md describes it. Pure functions: no asyncio, no Redis, no clock."""
