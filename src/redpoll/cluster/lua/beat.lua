#!lua flags=allow-oom
-- A worker's heartbeat, once a second.
--
-- KEYS  1 beat    beat counters by worker
--       2 dirver  version of the directory
--       3 ungranted  the revoked grants
-- ARGV  1 W
--       2 fresh   1: this W is new, so it needn't be in the table
-- Returns {'OK', dirver or nil, id of the last entry of ungranted or nil}, or {'FENCED'}: this W is gone, or being reaped.
--       The table itself isn't in the reply: it grows with the number of workers, and the leader alone reads it
--       (membership/reaper.py).

-- Added first and undone in the rare cases, because this script runs once a second for each worker of the cluster.
local beat = redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
if beat == 0 then
  redis.call('HSET', KEYS[1], ARGV[1], -1)
  return {'FENCED'}
end
if beat == 1 and ARGV[2] ~= '1' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return {'FENCED'}
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
return {'OK', redis.call('GET', KEYS[2]), last and last[1] or false}
