#!lua flags=allow-oom
-- Writes a webhook row that says whether a channel is occupied, or a user is a member of it, at this moment. For the
-- leader, after Redis may have lost writes that were announced.
--
-- KEYS  1 clock  the shard's last stamp
--       2 out    the shard's rows
--       3 left   leaves that are held back
--       4 c      the channel's counts by worker
--       5 p      the channel's users
-- ARGV  1 app id  2 channel  3 user; absent: the channel itself
-- Returns 1. Or 0: nothing was written, because the leave is held back and becomes a row after the debounce.

-- The limit on the stream, as in hold.lua.
local MAX_ROWS = 20000

local user = ARGV[3]
local subject = ARGV[1] .. ':' .. ARGV[2]
local event, detail, held_back
if user then
  local entry = redis.call('HGET', KEYS[5], user)
  event = entry and 'member.added' or 'member.removed'
  detail = entry and string.sub(entry, string.find(entry, '\n', 1, true) + 1) or ''
  held_back = not entry and redis.call('ZSCORE', KEYS[3], 'r:' .. subject .. ':' .. user)
else
  -- hold.lua keeps the sum of the counts of some channels.
  local total = tonumber(redis.call('HGET', KEYS[4], 'sum') or '0')
  if total == 0 then
    for _, count in ipairs(redis.call('HVALS', KEYS[4])) do total = total + tonumber(count) end
  end
  event = total > 0 and 'channel.occupied' or 'channel.vacated'
  detail = total > 0 and string.format('%.0f', total) or ''
  held_back = total == 0 and redis.call('ZSCORE', KEYS[3], 'v:' .. subject)
end
if held_back then return 0 end

local now = redis.call('TIME')
local now_ms = string.format('%s%03d', now[1], math.floor(now[2] / 1000))
local stamp = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, tonumber(now[1]) * 1000000 + tonumber(now[2]))
local id = string.format('%.0f', stamp)
local row = {'k', event, 'a', ARGV[1], 'c', ARGV[2], 't', now_ms}
for _, extra in ipairs({{'u', user}, {'x', detail}}) do
  if extra[2] and extra[2] ~= '' then
    row[#row + 1] = extra[1]
    row[#row + 1] = extra[2]
  end
end
redis.call('SET', KEYS[1], id)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', MAX_ROWS, id .. '-0', unpack(row))
return 1
