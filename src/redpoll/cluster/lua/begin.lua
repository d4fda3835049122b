#!lua flags=allow-oom
-- Begins the history of a channel that has none yet, for a reader who has no position: later it continues there. One
-- that exists lives longer.
--
-- KEYS  1 hm     the history's epoch (e), last offset (s), era (r), offset before the first message (b); the seconds
--                that messages are kept (t), set by the first publish
--       2 ha     the app's channels with history in the shard
--       3 clock  the shard's last stamp
-- ARGV  1 epoch to begin  2 era  3 channel  4 cap on the app's channels with history in this shard  5 seconds that a
--       history without a message outlives its last reader
-- Returns {epoch, last offset}; {false, '0'} if the app has as many channels with history as it may.

local hm, ha, channel, seconds = KEYS[1], KEYS[2], ARGV[3], tonumber(ARGV[5])
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local meta = redis.call('HMGET', hm, 'e', 's', 't')
local epoch, top = meta[1], meta[2] or '0'
if epoch and meta[3] then
  -- A day longer than a message of this moment, as in publish.lua.
  redis.call('EXPIRE', hm, meta[3] + 86400, 'GT')
  return {epoch, top}
end
local known = tonumber(redis.call('ZSCORE', ha, channel) or '0') > now_ms
-- As subscribes in hold.lua, readers alone take half of the cap.
if not epoch and not known
    and redis.call('ZCOUNT', ha, '(' .. string.format('%.0f', now_ms), '+inf') >= math.ceil(tonumber(ARGV[4]) / 2) then
  return {false, '0'}
end

-- Nothing is checked from here on.
if epoch then
  -- Subscribers may have set a longer expiry, which stays.
  redis.call('EXPIRE', hm, seconds, 'GT')
else
  local micros = tonumber(now[1]) * 1000000 + tonumber(now[2])
  epoch = ARGV[1]
  top = string.format('%.0f', math.max(tonumber(redis.call('GET', KEYS[3]) or '0') + 1, micros))
  redis.call('SET', KEYS[3], top)
  redis.call('HSET', hm, 'e', epoch, 's', top, 'r', ARGV[2], 'b', top)
  redis.call('EXPIRE', hm, seconds)
  redis.call('ZREMRANGEBYSCORE', ha, '-inf', string.format('%.0f', now_ms))
end
redis.call('ZADD', ha, 'GT', string.format('%.0f', now_ms + seconds * 1000), channel)
redis.call('EXPIRE', ha, 5184000)
return {epoch, top}
