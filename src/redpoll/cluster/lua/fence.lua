#!lua flags=allow-oom
-- Fences a worker in one shard: from here on Redis accepts only the reaper's calls for it.
--
-- KEYS  1 w  the worker's hash in the shard
-- Returns the number of channels that the worker holds there.

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'gen', '-1')
return redis.call('HLEN', KEYS[1]) - 1
