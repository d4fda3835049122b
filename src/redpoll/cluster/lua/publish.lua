#!lua
-- Publishes one event of a channel that caches or keeps history, one that webhooks are told of, or one that is
-- to be published once however often it is asked for. Every other event is a plain PUBLISH.
--
-- KEYS  k km     the channel's cached event; that there is none was told (flag c)
--       clock    the shard's last stamp (flags h, r)
--       h hm ha  the channel's messages; its epoch, last offset and era, for how many s they are kept, until when
--                (ms) nothing has to be tidied; the app's channels with history (flag h)
--       out      the shard's webhook rows (flag r)
--       i        this event of that request is published (flag i)
-- ARGV  1 PUBLISH or SPUBLISH  2 topic
--       3 flags  c the event is cached
--                h it is kept in the channel's history
--                r a row for webhooks is written
--                i it is published once
--       4 the envelope's tail  5 s that it is cached (flag c)  6 s that it counts as published (flag i)
--       7 app id  8 channel
--       9 messages kept  10 s that they are kept  11 cap on channels with history of the app in this shard
--       12 the epoch if the channel has none of this era  13 era (9 to 13: flag h)
--       14 user or ''  15 trace id or ''  16 the row's detail (14 to 16: flag r)
-- Returns {'OK', workers that got it, offset, epoch, full, dropped}; of an event that was published before, the
--         first two, as they were returned then. The offset is '0' where the event isn't kept; full is 1 if that is
--         for the cap, dropped 1 if there were too many rows to write another of this sort.

local command, topic, flags, tail = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local function flag(letter) return string.find(flags, letter, 1, true) ~= nil end
local caches, keeps, hooked, once = flag('c'), flag('h'), flag('r'), flag('i')

local taken = 0
local function key(wanted)
  if not wanted then return nil end
  taken = taken + 1
  return KEYS[taken]
end
local k, km, clock = key(caches), key(caches), key(keeps or hooked)
local h, hm, ha = key(keeps), key(keeps), key(keeps)
local out, i = key(hooked), key(once)

local before = once and redis.call('GET', i)
if before then return {'OK', tonumber(before)} end

local micros, stamp, prev, epoch, full, dropped = 0, 0, '0', nil, 0, 0
local app, channel, seconds = ARGV[7], ARGV[8], tonumber(ARGV[10])
if keeps or hooked then
  local now = redis.call('TIME')
  micros = tonumber(now[1]) * 1000000 + tonumber(now[2])
  stamp = math.max(tonumber(redis.call('GET', clock) or '0') + 1, micros)
end
local now_ms = string.format('%.0f', math.floor(micros / 1000))
local known, tidy = true, false
if keeps then
  local meta = redis.call('HMGET', hm, 'e', 's', 'r', 't', 'x')
  epoch, prev = meta[1], meta[2] or '0'
  -- Between two eras there may be events that were not kept: nothing links the one to the other.
  if (meta[3] or '') ~= ARGV[13] then epoch = nil end
  stamp = math.max(stamp, tonumber(prev) + 1)
  -- Of a new epoch the first message follows on nothing that anybody has.
  if not epoch then prev = string.format('%.0f', stamp - 1) end
  tidy = epoch and meta[4] == ARGV[10] and tonumber(meta[5] or '0') > tonumber(now_ms)
  known = tidy or tonumber(redis.call('ZSCORE', ha, channel) or '0') > tonumber(now_ms)
  if not known and redis.call('ZCOUNT', ha, '(' .. now_ms, '+inf') >= tonumber(ARGV[11]) then full = 1 end
end
if hooked and redis.call('XLEN', out) >= 10000 then dropped = 1 end

-- Nothing is checked from here on. What is cached or kept comes before what is published, in the same step: who
-- joins hears of it exactly once.
local id = string.format('%.0f', stamp)
if keeps or hooked then redis.call('SET', clock, id) end
if caches then
  redis.call('SET', k, tail, 'EX', ARGV[5])
  redis.call('DEL', km)
end
local offset = '0'
if full == 1 then
  -- Whoever goes on from an offset of before would miss this event and be told otherwise: a later epoch is another.
  redis.call('DEL', hm)
elseif keeps then
  offset = id
  redis.call('XADD', h, 'MAXLEN', '=', ARGV[9], id .. '-0', 'p', prev, 'd', tail)
  if tidy then
    redis.call('HSET', hm, 's', id)
  else
    -- Not with every message: what is too old is read no more, and everything lives as much longer as it waits for this.
    local kept_ms, apart_ms = seconds * 1000, math.floor(math.min(seconds * 1000 / 16, 60000))
    epoch = epoch or ARGV[12]
    redis.call('XTRIM', h, 'MINID', '=', string.format('%.0f', micros - kept_ms * 1000))
    redis.call('PEXPIRE', h, kept_ms + apart_ms)
    redis.call('HSET', hm, 'e', epoch, 's', id, 'r', ARGV[13], 't', seconds,
      'x', string.format('%.0f', now_ms + apart_ms))
    -- A day longer than the longest rule.
    redis.call('EXPIRE', hm, 2678400)
    if not known then redis.call('ZREMRANGEBYSCORE', ha, '-inf', now_ms) end
    redis.call('ZADD', ha, string.format('%.0f', now_ms + kept_ms + apart_ms), channel)
    if not known then redis.call('EXPIRE', ha, 5184000) end
  end
else
  prev = '0'
end
if full == 1 then prev = '0' end
local receivers = redis.call(command, topic, 'e ' .. offset .. ' ' .. prev .. ' ' .. tail)
if hooked and dropped == 0 then
  local row = {'k', 'client_event', 'a', app, 'c', channel, 't', now_ms, 'x', ARGV[16]}
  for _, each in ipairs({{'u', ARGV[14]}, {'i', ARGV[15]}}) do
    if each[2] ~= '' then
      row[#row + 1] = each[1]
      row[#row + 1] = each[2]
    end
  end
  redis.call('XADD', out, 'MAXLEN', '~', 20000, id .. '-0', unpack(row))
end
if once then redis.call('SET', i, receivers, 'EX', ARGV[6]) end
return {'OK', receivers, offset, epoch or '', full, dropped}
