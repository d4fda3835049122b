#!lua flags=allow-oom
-- A worker's heartbeat, once a second.
--
-- KEYS  1 beat    beat counters by worker
--       2 dirver  version of the directory
-- ARGV  1 W
--       2 fresh   1: this W is new, so it needn't be in the table
-- Returns {'OK', Redis' time in ms, dirver or nil, the beat table, flat}, or {'FENCED'}: this W is gone, or being
-- reaped.

local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored == '-1' or (not stored and ARGV[2] ~= '1') then return {'FENCED'} end
redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
local now = redis.call('TIME')
local ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
return {'OK', ms, redis.call('GET', KEYS[2]), redis.call('HGETALL', KEYS[1])}
