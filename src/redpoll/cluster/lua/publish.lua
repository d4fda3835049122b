#!lua
-- Publishes one event that is cached, stored in a history, sent to webhooks, or published once however often the call
-- is repeated. Every other event is a plain PUBLISH. publish_call.py encodes the call, decodes the reply, and uses the
-- same names for the letters.
--
-- KEYS  k km ka  the channel's cached event; marker: the cache miss was reported; the app's channels with a cached
--                event, by the ms at which it expires (CACHE)
--       clock    the shard's last stamp (HISTORY, ROW)
--       h hm ha c
--                the channel's messages; its epoch (e), last offset (s), era (r), the seconds that messages are kept
--                (t), the ms until which nothing has to be trimmed (x), the offset before the epoch's first message (b),
--                and the offset of the event that ended the channel (z); the app's channels with history; the channel's
--                counts by worker (HISTORY)
--       out      the shard's webhook rows (ROW)
--       i        marker: this event of that request was published (ONCE)
-- ARGV  1 PUBLISH or SPUBLISH  2 topic  3 flags
--       4 the envelope's tail  5 seconds that it is cached  6 cap on the app's channels with a cached event in this
--       shard (5 and 6: CACHE)  7 seconds that it is remembered (ONCE)  8 app id  9 channel
--       10 number of messages kept  11 seconds that they are kept  12 cap on the app's channels with history in this
--       shard  13 the epoch to begin if the channel has none of this era  14 era (10 to 14: HISTORY)
--       15 user or ''  16 trace id or ''  17 the row's detail (15 to 17: ROW)
-- Returns {'OK', receivers, offset, epoch, over_cap, dropped, uncached}; for an event that was published before, only
--       the first two, as they were then. receivers: the workers that got it. offset: '0' if the event isn't stored.
--       over_cap: 1 if that is because of the cap. dropped: 1 if no row was written because too many are unread.
--       uncached: 1 if the event isn't cached because of the cap.
--       Or, when nothing was published: {'ENDED'}: an earlier event ended the channel; {'UNKEPT'}: this one can't end
--       it, because the cap keeps it from being stored.

local command, topic, flags, tail = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local function flag(letter) return string.find(flags, letter, 1, true) ~= nil end

-- The flags. The event becomes the channel's cached event.
local CACHE = flag('c')
-- It is stored in the channel's history.
local HISTORY = flag('h')
-- A webhook row is written.
local ROW = flag('r')
-- It is published once.
local ONCE = flag('i')
-- It is the channel's last event, until the history is cleared. Only with HISTORY.
local END = flag('e')

-- The envelope that follows the last event (envelopes.py).
local HISTORY_ENDED = 'z'

-- Limits on the stream of webhook rows, as in hold.lua.
local MAX_OPTIONAL_ROWS, MAX_ROWS = 10000, 20000

local taken = 0
local function key(wanted)
  if not wanted then return nil end
  taken = taken + 1
  return KEYS[taken]
end
local k, km, ka, clock = key(CACHE), key(CACHE), key(CACHE), key(HISTORY or ROW)
local h, hm, ha, c = key(HISTORY), key(HISTORY), key(HISTORY), key(HISTORY)
local out, i = key(ROW), key(ONCE)

local before = ONCE and redis.call('GET', i)
if before then return {'OK', tonumber(before)} end

local micros, stamp, prev, epoch, over_cap, dropped, uncached = 0, 0, '0', nil, 0, 0, 0
local app, channel, seconds = ARGV[8], ARGV[9], tonumber(ARGV[11])
if HISTORY or ROW or CACHE then
  local now = redis.call('TIME')
  micros = tonumber(now[1]) * 1000000 + tonumber(now[2])
end
if HISTORY or ROW then stamp = math.max(tonumber(redis.call('GET', clock) or '0') + 1, micros) end
local now_ms = string.format('%.0f', math.floor(micros / 1000))
-- The channel counts among those with a cached event.
local counted = true
if CACHE then
  counted = tonumber(redis.call('ZSCORE', ka, channel) or '0') > tonumber(now_ms)
  if not counted and redis.call('ZCOUNT', ka, '(' .. now_ms, '+inf') >= tonumber(ARGV[6]) then uncached = 1 end
end
-- `trimmed`: nothing has to be trimmed or renewed yet. `known`: the channel counts among those with history.
local known, trimmed = true, false
if HISTORY then
  local meta = redis.call('HMGET', hm, 'e', 's', 'r', 't', 'x', 'z')
  if meta[6] then return {'ENDED'} end
  epoch, prev = meta[1], meta[2] or '0'
  -- Events between two eras were perhaps not stored, so a new era begins a new epoch.
  if (meta[3] or '') ~= ARGV[14] then epoch = nil end
  stamp = math.max(stamp, tonumber(prev) + 1)
  -- The first message of an epoch follows an offset that no message has.
  if not epoch then prev = string.format('%.0f', stamp - 1) end
  trimmed = epoch and meta[4] == ARGV[11] and tonumber(meta[5] or '0') > tonumber(now_ms)
  known = trimmed or tonumber(redis.call('ZSCORE', ha, channel) or '0') > tonumber(now_ms)
  if not known and redis.call('ZCOUNT', ha, '(' .. now_ms, '+inf') >= tonumber(ARGV[12]) then over_cap = 1 end
  if over_cap == 1 and END then return {'UNKEPT'} end
end
if ROW and redis.call('XLEN', out) >= MAX_OPTIONAL_ROWS then dropped = 1 end

-- Nothing is checked from here on. The event is cached and stored before it is published, in the same step: a joiner
-- gets it exactly once.
local id = string.format('%.0f', stamp)
if HISTORY or ROW then redis.call('SET', clock, id) end
if uncached == 1 then
  -- Joiners must not get an event that isn't the last one.
  redis.call('DEL', k)
elseif CACHE then
  redis.call('SET', k, tail, 'EX', ARGV[5])
  redis.call('DEL', km)
  if not counted then redis.call('ZREMRANGEBYSCORE', ka, '-inf', now_ms) end
  redis.call('ZADD', ka, string.format('%.0f', now_ms + ARGV[5] * 1000), channel)
  -- 8 days: a day longer than an event can be cached. Each time: channels that are refreshed must not lose their place.
  redis.call('EXPIRE', ka, 691200)
end
local offset = '0'
if over_cap == 1 then
  -- This event is not stored. A client that recovers from an earlier offset would miss it unnoticed; so the epoch ends.
  -- The messages of that epoch go with it: otherwise a later epoch would begin with them.
  redis.call('UNLINK', hm, h)
elseif HISTORY then
  offset = id
  redis.call('XADD', h, 'MAXLEN', '=', ARGV[10], id .. '-0', 'p', prev, 'd', tail)
  if trimmed then
    redis.call('HSET', hm, 's', id)
  else
    -- Not with every message, because it costs more than the rest. Messages that are too old are not read even if they
    -- are still stored, and everything expires later by the time between two of these.
    local kept_ms, interval_ms = seconds * 1000, math.floor(math.min(seconds * 1000 / 16, 60000))
    if not epoch then redis.call('HSET', hm, 'b', prev) end
    epoch = epoch or ARGV[13]
    redis.call('XTRIM', h, 'MINID', '=', string.format('%.0f', micros - kept_ms * 1000))
    redis.call('PEXPIRE', h, kept_ms + interval_ms)
    redis.call('HSET', hm, 'e', epoch, 's', id, 'r', ARGV[14], 't', seconds,
      'x', string.format('%.0f', now_ms + interval_ms))
    -- A day longer than the messages. While somebody is subscribed 31 days, as long as for the longest rule: in a quiet
    -- channel subscribers must not get another epoch although they missed nothing. hold.lua has the same.
    local outlives_s = math.ceil((kept_ms + interval_ms) / 1000) + 86400
    redis.call('EXPIRE', hm, redis.call('EXISTS', c) == 1 and 2678400 or outlives_s)
    if not known then redis.call('ZREMRANGEBYSCORE', ha, '-inf', now_ms) end
    redis.call('ZADD', ha, string.format('%.0f', now_ms + kept_ms + interval_ms), channel)
    if not known then redis.call('EXPIRE', ha, 5184000) end
  end
else
  prev = '0'
end
if over_cap == 1 then prev = '0' end
local receivers = redis.call(command, topic, 'e ' .. offset .. ' ' .. prev .. ' ' .. tail)
if END then
  redis.call('HSET', hm, 'z', id)
  redis.call(command, topic, HISTORY_ENDED .. ' ' .. id)
end
if ROW and dropped == 0 then
  local row = {'k', 'client_event', 'a', app, 'c', channel, 't', now_ms, 'x', ARGV[17]}
  for _, extra in ipairs({{'u', ARGV[15]}, {'i', ARGV[16]}}) do
    if extra[2] ~= '' then
      row[#row + 1] = extra[1]
      row[#row + 1] = extra[2]
    end
  end
  redis.call('XADD', out, 'MAXLEN', '~', MAX_ROWS, id .. '-0', unpack(row))
end
if ONCE then redis.call('SET', i, receivers, 'EX', ARGV[7]) end
return {'OK', receivers, offset, epoch or '', over_cap, dropped, uncached}
