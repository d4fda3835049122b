#!lua flags=no-writes
-- Finds the offset after which the last n messages of a channel begin, or those of the last seconds.
--
-- KEYS  1 h   the channel's messages
--       2 hm  its epoch and last offset
-- ARGV  1 count back from this offset, or '+': from the newest  2 n, at most 256; 0: by time
--       3 seconds (n = 0)
-- Returns {offset, messages counted}. If n were counted there may be more: call again from that offset. An offset
-- before
--         the oldest message is good for reading from, but no message has it.

local n = tonumber(ARGV[2])
local meta = redis.call('HMGET', KEYS[2], 's', 't')
local now = redis.call('TIME')
local function ago(seconds) return tonumber(now[1]) * 1000000 + tonumber(now[2]) - tonumber(seconds) * 1000000 end

if n == 0 then
  return {string.format('%.0f', math.max(0, ago(ARGV[3]))), 0}
end
local from, low = ARGV[1], '-'
if from ~= '+' then from = from .. '-0' end
if meta[2] then low = '(' .. string.format('%.0f', ago(meta[2])) .. '-0' end
local rows = redis.call('XREVRANGE', KEYS[1], from, low, 'COUNT', n)
if #rows == 0 then return {ARGV[1] == '+' and (meta[1] or '0') or ARGV[1], 0} end
return {rows[#rows][2][2], #rows}
