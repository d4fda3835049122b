#!lua flags=allow-oom
-- Reads a shard's webhook rows, oldest first, and deletes those that the reader has stored. Leaves that are older than
-- the debounce become rows first. If the reply is lost, the same call returns the same rows again.
--
-- KEYS  1 clock  the shard's last stamp
--       2 out    the shard's rows
--       3 left   v:A:C and r:A:C:U, by the ms of the leave
-- ARGV  1 the stamp up to which the reader has stored all rows, or ''  2 debounce in ms  3 most leaves made into rows
--       4 most rows returned  5 bytes after which no further row is returned  6 the stamp after which to read, or ''
-- Returns {rows, waiting, leaves, made, lost}: a row is {id, flat fields}. waiting: the rows in `out`, those
--         returned included. leaves: the entries of `left`. made: leaves that became rows now. lost: rows that were
--         removed unread since the last call, because the stream was full.

-- Limits, as in hold.lua.
local MAX_OPTIONAL_ROWS, MAX_ROWS = 10000, 20000

-- `entries-added` of the stream counts removed rows too. After each reading it is set back to the length (below), so
-- the difference is the number of rows removed since then.
local length, lost = redis.call('XLEN', KEYS[2]), 0
if length >= MAX_ROWS then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'entries-added' then lost = info[i + 1] - length end
  end
end

local due, now_ms = {}, 0
local left = redis.call('ZCARD', KEYS[3])
-- When many rows are unread, leaves stay in `left`, where none is ever lost.
if left > 0 and length < MAX_OPTIONAL_ROWS then
  local now = redis.call('TIME')
  now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
  local before = string.format('%.0f', now_ms - tonumber(ARGV[2]))
  due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', before, 'WITHSCORES', 'LIMIT', 0, ARGV[3])
  if #due < 2 * ARGV[3] then
    -- Leaves from the future: the clock was set back since, so their age is unknown. They count as due.
    local ahead = '(' .. string.format('%.0f', now_ms)
    local room = ARGV[3] - #due / 2
    for _, part in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], ahead, '+inf', 'WITHSCORES', 'LIMIT', 0, room)) do
      due[#due + 1] = part
    end
  end
  if #due > 0 then
    local stamp = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1,
                           tonumber(now[1]) * 1000000 + tonumber(now[2]))
    redis.call('SET', KEYS[1], string.format('%.0f', stamp + #due / 2 - 1))
    for i = 1, #due, 2 do
      local kind, app, channel, user = string.match(due[i], '^(%a):([^:]*):([^:]*):?(.*)$')
      local row = {'k', kind == 'r' and 'member.removed' or 'channel.vacated', 'a', app, 'c', channel, 't', due[i + 1]}
      if kind == 'r' then
        row[#row + 1] = 'u'
        row[#row + 1] = user
      end
      redis.call('XADD', KEYS[2], string.format('%.0f', stamp + (i - 1) / 2) .. '-0', unpack(row))
      redis.call('ZREM', KEYS[3], due[i])
    end
    left = left - #due / 2
  end
end

if ARGV[1] ~= '' then
  redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[1] .. '-1')
end
length = redis.call('XLEN', KEYS[2])
if (lost > 0 or ARGV[1] ~= '') and redis.call('EXISTS', KEYS[2]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      redis.call('XSETID', KEYS[2], info[i + 1], 'ENTRIESADDED', length)
    end
  end
end

local rows, bytes = {}, 0
local from = ARGV[6] == '' and '-' or '(' .. ARGV[6] .. '-0'
local left_rows = length > 0 and tonumber(ARGV[4]) or 0
-- A few at a time, so that large rows cost little more than what is returned.
while left_rows > 0 and bytes <= tonumber(ARGV[5]) do
  local asked = math.min(16, left_rows)
  local share = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', asked)
  for _, row in ipairs(share) do
    if bytes > tonumber(ARGV[5]) then break end
    for _, part in ipairs(row[2]) do bytes = bytes + #part end
    rows[#rows + 1] = row
  end
  if #share < asked then break end
  left_rows = left_rows - asked
  from = '(' .. share[asked][1]
end
return {rows, length, left, #due / 2, lost}
