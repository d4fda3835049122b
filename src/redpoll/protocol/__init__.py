"""What the protocol says. No asyncio, no Redis, no clock: functions of their arguments."""
