#!lua flags=allow-oom
-- Removes a dead node, unless it has sent a heartbeat since the one by which it was found dead.
--
-- KEYS  1 nodes  2 drained
-- ARGV  1 run  2 the number of its last heartbeat
-- Returns 1, or 0 if it lives.

local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.format('%.0f', cjson.decode(entry)['beat']) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
