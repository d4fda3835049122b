#!lua flags=allow-oom
-- Reserves places for channels that are about to become occupied, in the order of the calls (membership/places.py).
--
-- KEYS  1 pl  reservations of one app, `<worker> <channel>`, by a stamp in µs
-- ARGV  1 ms after which a reservation ends, because its worker may be dead  2... reservations
-- Returns all reservations, in their order.

local now = redis.call('TIME')
local micros, lives_us = tonumber(now[1]) * 1000000 + tonumber(now[2]), tonumber(ARGV[1]) * 1000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', micros - lives_us))
-- The clock was set back.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', micros + lives_us), '+inf')

local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local stamp = math.max(tonumber(last[2] or '0') + 1, micros)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', stamp + i - 2), ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('ZRANGE', KEYS[1], 0, -1)
