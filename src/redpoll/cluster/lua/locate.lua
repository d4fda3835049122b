#!lua flags=no-writes
-- Finds the offset after which the last n messages of a channel begin, or those of the last seconds.
--
-- KEYS  1 h   the channel's messages
--       2 hm  its epoch and last offset
-- ARGV  1 count back from this offset, or '+': from the newest  2 n, at most 256; 0: by time
--       3 seconds (n = 0)  4 bytes of the messages together; those that are read last may have more
-- Returns {offset, messages counted, more}. more is 1 if there may be others: call again from that offset. An offset
--         before the oldest message is good for reading from, but no message has it.

local n = tonumber(ARGV[2])
local meta = redis.call('HMGET', KEYS[2], 's', 't')
local now = redis.call('TIME')
local function ago(seconds) return tonumber(now[1]) * 1000000 + tonumber(now[2]) - tonumber(seconds) * 1000000 end

if n == 0 then
  return {string.format('%.0f', math.max(0, ago(ARGV[3]))), 0, 0}
end
local from, low = ARGV[1], '-'
if from ~= '+' then from = from .. '-0' end
if meta[2] then low = '(' .. string.format('%.0f', ago(meta[2])) .. '-0' end
local offset = ARGV[1] == '+' and (meta[1] or '0') or ARGV[1]
local counted, bytes = 0, 0
-- A few at a time, because Redis copies whole messages.
while counted < n and bytes < tonumber(ARGV[4]) do
  local asked = math.min(16, n - counted)
  local share = redis.call('XREVRANGE', KEYS[1], from, low, 'COUNT', asked)
  for _, row in ipairs(share) do
    bytes = bytes + #row[2][4]
    offset = row[2][2]
  end
  counted = counted + #share
  if #share < asked then return {offset, counted, 0} end
  from = '(' .. share[asked][1]
end
return {offset, counted, 1}
