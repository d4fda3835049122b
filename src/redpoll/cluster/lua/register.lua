#!lua flags=allow-oom
-- Registers the connection that may speak for a worker in one shard. Calls of earlier connections are refused.
--
-- KEYS  1 w      this worker's hash in the shard
-- ARGV  1 gen    the number of the connection, from 1
--       2 fresh  1: this W is new, so the hash must not exist
-- Returns {'OK', all fields of w, flat}, {'FENCED'} (this W is gone, or being reaped) or {'STALE'} (gen isn't greater
--       than the stored one).

local stored = redis.call('HGET', KEYS[1], 'gen')
if ARGV[2] == '1' then
  if stored then return {'STALE'} end
else
  if not stored or stored == '-1' then return {'FENCED'} end
  if tonumber(stored) >= tonumber(ARGV[1]) then return {'STALE'} end
end
redis.call('HSET', KEYS[1], 'gen', ARGV[1])
return {'OK', redis.call('HGETALL', KEYS[1])}
