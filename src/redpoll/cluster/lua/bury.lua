#!lua flags=allow-oom
-- Deletes a worker's hash in one shard, if the worker holds nothing there.
--
-- KEYS  1 w  the worker's hash in the shard
-- Returns 1 if the hash is gone, 0 if it still lists channels.

if redis.call('HLEN', KEYS[1]) > 1 then return 0 end
redis.call('DEL', KEYS[1])
return 1
