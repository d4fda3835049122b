#!lua flags=allow-oom
-- Runs one command also while Redis is full: what it writes is small, and must not wait for room.
--
-- KEYS  1 the command's key
-- ARGV  1 the command  2… what follows its key
-- Returns what the command returns.

return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
