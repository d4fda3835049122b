#!lua flags=allow-oom
-- Fetches a shard's rows for webhooks, oldest first, and lets go of those that the reader has in safety. Who left
-- long enough ago and hasn't come back becomes a row first. Nothing is lost if the answer is: the same call again
-- brings the same rows.
--
-- KEYS  1 clock  the shard's last stamp
--       2 out    the shard's rows
--       3 left   v:A:C and r:A:C:U, by the ms of the leave
-- ARGV  1 the id up to which all is in safety, or ''  2 ms that a leave waits  3 most leaves made rows
--       4 most rows returned  5 bytes after which no further row is  6 the id after which to read, or ''
-- Returns {rows, waiting, leaves, made, lost}: a row is {id, flat fields}; waiting is the number of rows in `out`
--         now, those returned included, leaves that of `left`; made are leaves that became rows now; lost are
--         rows that were pushed out unread since the last call.

-- Removed rows leave a trace in the stream's own count, which is set right whenever it is read.
local length, lost = redis.call('XLEN', KEYS[2]), 0
if length >= 20000 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'entries-added' then lost = info[i + 1] - length end
  end
end

local due, now_ms = {}, 0
local left = redis.call('ZCARD', KEYS[3])
-- With many rows unread leaves go on waiting, where none is ever lost.
if left > 0 and length < 10000 then
  local now = redis.call('TIME')
  now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
  local before = string.format('%.0f', now_ms - tonumber(ARGV[2]))
  due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', before, 'WITHSCORES', 'LIMIT', 0, ARGV[3])
  if #due < 2 * ARGV[3] then
    -- From before the clock was set back: nobody knows how old.
    local ahead = '(' .. string.format('%.0f', now_ms)
    local most = ARGV[3] - #due / 2
    for _, each in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], ahead, '+inf', 'WITHSCORES', 'LIMIT', 0, most)) do
      due[#due + 1] = each
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
if length > 0 then
  local from = ARGV[6] == '' and '-' or '(' .. ARGV[6] .. '-0'
  for _, row in ipairs(redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', ARGV[4])) do
    if bytes > tonumber(ARGV[5]) then break end
    for _, each in ipairs(row[2]) do bytes = bytes + #each end
    rows[#rows + 1] = row
  end
end
return {rows, length, left, #due / 2, lost}
