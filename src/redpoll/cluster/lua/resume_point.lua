#!lua flags=allow-oom
-- Writes since when a user may have missed events.
--
-- KEYS  1 y   the user's point
-- ARGV  1 how long ago by Redis' clock, µs  2 seconds until it expires
-- Returns the point, µs.

local now = redis.call('TIME')
local point = tonumber(now[1]) * 1000000 + tonumber(now[2]) - tonumber(ARGV[1])
point = string.format('%.0f', math.max(0, point))
redis.call('SET', KEYS[1], point, 'EX', ARGV[2])
return point
