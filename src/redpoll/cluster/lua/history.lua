#!lua flags=no-writes
-- Reads a page of a channel's history: messages between two offsets, from either end, as many as fit.
--
-- KEYS  1 h   the channel's messages
--       2 hm  its epoch and last offset
-- ARGV  1 after this offset  2 up to this offset, or '+'
--       3 count, at most 64  4 bytes of the messages together; a single one may have more
--       5 'first': the oldest in the range, or 'last': the newest
-- Returns {epoch or nil, last offset, more, rows, base, ended}, rows oldest first and flat: offset, offset before it,
--         envelope's tail. more is 1 if the limits left out others in the range. Without an epoch there are no rows.
--         base is the offset before the epoch's first message, '0' if it isn't known. ended is 1 if an event ended the
--         channel (publish.lua).

local after, upto, count, max_bytes = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local meta = redis.call('HMGET', KEYS[2], 'e', 's', 't', 'b', 'z')
local epoch, top = meta[1], meta[2] or '0'
if not epoch then return {false, '0', 0, {}, '0', 0} end

-- Messages that are too old don't count, although only the next publish deletes them.
if meta[3] then
  local now = redis.call('TIME')
  after = math.max(after, tonumber(now[1]) * 1000000 + tonumber(now[2]) - tonumber(meta[3]) * 1000000)
end
local low = '(' .. string.format('%.0f', after) .. '-0'
local high = upto
if upto ~= '+' then high = upto .. '-0' end

local forward = ARGV[5] == 'first'
local messages, bytes, more = {}, 0, 0
-- A few at a time, so that large messages cost no more than what is returned.
while more == 0 and after < tonumber(top) do
  local share
  if forward then
    share = redis.call('XRANGE', KEYS[1], low, high, 'COUNT', 16)
  else
    share = redis.call('XREVRANGE', KEYS[1], high, low, 'COUNT', 16)
  end
  for _, row in ipairs(share) do
    bytes = bytes + #row[2][4]
    if #messages == count or (#messages > 0 and bytes > max_bytes) then
      more = 1
      break
    end
    messages[#messages + 1] = row
  end
  if #share < 16 then break end
  if forward then low = '(' .. share[16][1] else high = '(' .. share[16][1] end
end

local rows = {}
for i = 1, #messages do
  local row = forward and messages[i] or messages[#messages + 1 - i]
  rows[#rows + 1] = string.sub(row[1], 1, -3)
  rows[#rows + 1] = row[2][2]
  rows[#rows + 1] = row[2][4]
end
return {epoch, top, more, rows, meta[4] or '0', meta[5] and 1 or 0}
