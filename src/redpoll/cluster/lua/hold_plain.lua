#!lua flags=allow-oom
-- hold.lua for a channel of which Redis stores nothing but the counts: no members, no webhook rows, no cache, no history,
-- no subscription_count. Nearly all calls are of this kind. A test makes the same calls of both scripts and compares.
-- membership/hold_call.py packs the call.
--
-- KEYS  1 w  2 a  3 left  4 c, as in hold.lua
-- ARGV  1 W  2 gen  3 app id  4 channel  5 base: the number of attached sockets that stay  6 number of joins
--       7 share, as in hold.lua, for a channel that W doesn't hold yet; empty: none
-- Returns the digit of each join: 1, or 2 (beyond the share). Or {'FENCED'} or {'STALE'}, as hold.lua.

local W, channel, base, joins, share = ARGV[1], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local field = ARGV[3] .. ':' .. channel

local stored = redis.call('HGET', KEYS[1], 'gen')
if not stored or stored == '-1' then return {'FENCED'} end
if stored ~= ARGV[2] then return {'STALE'} end

local holders = redis.call('HLEN', KEYS[4])
-- hold.lua keeps the sum of the counts there while the app has subscription_count turned on. This call doesn't.
if holders > 0 then holders = holders - redis.call('HDEL', KEYS[4], 'sum') end
local digit = 1
if share and holders == 0 and redis.call('SCARD', KEYS[2]) >= share then digit, joins = 2, 0 end

local n = base + joins
if n > 0 then
  redis.call('HSET', KEYS[4], W, n)
  redis.call('HSET', KEYS[1], field, 'c' .. n)
  if holders == 0 then
    redis.call('SADD', KEYS[2], channel)
    -- If a webhook wanted its leave, the leave wasn't reported yet, and neither is the return.
    redis.call('ZREM', KEYS[3], 'v:' .. field)
  end
else
  redis.call('HDEL', KEYS[1], field)
  if redis.call('HDEL', KEYS[4], W) == 1 and holders == 1 then redis.call('SREM', KEYS[2], channel) end
end
return digit
