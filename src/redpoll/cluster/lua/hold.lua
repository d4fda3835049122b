#!lua flags=allow-oom
-- Stores what one worker holds of one channel. Join, leave, re-assertion and reaping are all this one step, because
-- the values are absolute (cluster/membership/README.md "hold"). Everything is read and decided before the first write.
-- membership/hold_call.py encodes the call, decodes the reply, and uses the same names for the letters.
--
-- KEYS  1 w      this worker's hash in the channel's shard
--       2 c      the channel's counts by worker
--       3 a      the app's occupied channels in the shard
--       4 clock  the shard's last stamp
--       5 out    the shard's webhook rows
--       6 left   leaves that are held back; they become webhook rows after the debounce
--       then p      the channel's users (PRESENCE)
--       then n      the count last announced, and when, if that is less than a minute ago or another one waits (COUNT)
--       then k      the cached event (CACHED)
--       then km     marker: the cache miss was reported (CACHED and CACHE_MISS_ROWS)
--       then hm ha  the epoch and last offset of the channel's history; the app's channels with history (HISTORY or
--                   HISTORY_ENDS)
-- ARGV  1 W  2 gen (-1: the reaper's)  3 kind  4 flags
--       5 app id  6 channel  7 base: the number of attached sockets that stay
--       8 cap on users (PRESENCE) or on the sum of all counts (CONNECTIONS); 0: none
--       9 topic  10 PUBLISH or SPUBLISH  11 number of gone users  12 number of joins
--       13... the gone users; then for PRESENCE a user and a user_info per join; then for HISTORY the epoch to begin if
--       the channel has none of this era, the seconds that messages are kept, the cap on the app's channels with
--       history in this shard, and the era; then for OCCUPIED_LIMIT the app's share of occupied channels in this
--       shard; then for DEBOUNCE the debounce in ms
-- Returns {'OK', stamp, accepted, added, removed[, roster][, cached][, epoch, top][, total, due][, dropped]}.
--       accepted: a digit per join: 1, or 0 (beyond the cap), or 2 (beyond the share of occupied channels: the channel needs
--       a place). added, removed: the joins and the gone users that this call announced, counted from 0. roster (ROSTER): p, flat. cached (CACHED): an envelope's tail, or nil. epoch, top (HISTORY):
--       epoch is nil if the app has no history left to give; top is the last offset. total, due (COUNT): the sum of all
--       counts, and the ms until it may be announced, 0 if it is. dropped (COUNT_ROWS or CACHE_MISS_ROWS): the number
--       of webhook rows that were not written because too many are unread.
--       Or {'FENCED'}: this W was given up. Or {'STALE'}: another connection speaks for it.

local kind, flags = ARGV[3], ARGV[4]
local function flag(letter) return string.find(flags, letter, 1, true) ~= nil end

-- The kinds.
local CHANNEL = kind == 'c'
local PRESENCE = kind == 'p'
-- A user's signed-in connections.
local SIGNED_IN = kind == 'u'
-- An app's connections.
local CONNECTIONS = kind == 'q'

-- The flags. The reply carries the roster.
local ROSTER = flag('r')
-- More users of W are removed in later calls.
local USERS_REMAIN = flag('u')
-- The user_info of a known user doesn't change.
local KEEP_INFO = flag('k')
-- Announce subscription_count; the reply carries it.
local COUNT = flag('s')
-- W ends: it makes no later call to announce the count.
local WORKER_ENDS = flag('e')
-- The reply carries the cached event.
local CACHED = flag('c')
-- The reply carries the position of the history, which is created if it doesn't exist.
local HISTORY = flag('h')
-- If nobody is left, a history in which nothing was published ends within minutes.
local HISTORY_ENDS = flag('z')
-- An unoccupied channel may only be joined if the app has fewer occupied channels in this shard than its share.
local OCCUPIED_LIMIT = flag('l')
-- Write webhook rows: channel.occupied and .vacated; member.added and .removed; subscription.count; cache.miss.
local OCCUPANCY_ROWS = flag('o')
local MEMBER_ROWS = flag('m')
local COUNT_ROWS = flag('S')
local CACHE_MISS_ROWS = flag('X')
-- Rows for vacated and removed are held back in `left`. Without it, the debounce is 0.
local DEBOUNCE = flag('d')

-- Limits on the stream of webhook rows: above the first, rows that nobody relies on are not written; above the
-- second, the oldest rows are lost. publish.lua and outbox_take.lua have the same.
local MAX_OPTIONAL_ROWS, MAX_ROWS = 10000, 20000

-- The field of `c` with the sum of all counts, so that it isn't added up over all workers at each call. Only calls with
-- CONNECTIONS or COUNT keep it; others remove it, and hold_plain.lua does. The name of a worker has dots.
local SUM = 'sum'

-- The seconds for which a history without a message outlives its last subscriber, and for which one with messages
-- outlives these.
local EMPTY_HISTORY_S, OLD_HISTORY_S = 300, 86400
-- The seconds for which one with messages lives at least from a subscribe on. publish.lua has the same.
local HELD_HISTORY_S = 2678400

-- The envelopes that this script publishes (envelopes.py).
local MEMBER_ADDED, MEMBER_REMOVED, TOTAL, USER_ONLINE, USER_OFFLINE = 'm', 'r', 'n', 'o', 'f'

local W, gen = ARGV[1], ARGV[2]
local channel, base, cap = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local topic, command = ARGV[9], ARGV[10]
local gone, joins = tonumber(ARGV[11]), tonumber(ARGV[12])
local field = ARGV[5] .. ':' .. channel

local stored = redis.call('HGET', KEYS[1], 'gen')
if not stored or (stored == '-1' and gen ~= '-1') then return {'FENCED'} end
if stored ~= gen then return {'STALE'} end

local key_of, at = {}, 6
for _, key in ipairs({{'p', PRESENCE}, {'n', COUNT}, {'k', CACHED}, {'km', CACHED and CACHE_MISS_ROWS},
                      {'hm', HISTORY or HISTORY_ENDS}, {'ha', HISTORY or HISTORY_ENDS}}) do
  if key[2] then
    at = at + 1
    key_of[key[1]] = KEYS[at]
  end
end

local last = tonumber(redis.call('GET', KEYS[4]) or '0')
local counts = redis.call('HMGET', KEYS[2], W, SUM)
local held, sum = tonumber(counts[1] or '0'), counts[2]
local holders = redis.call('HLEN', KEYS[2]) - (sum and 1 or 0)
-- Where the arguments of HISTORY and those after them begin.
local first = 13 + gone + (PRESENCE and 2 * joins or 0)
local debounce_ms = DEBOUNCE and tonumber(ARGV[first + (HISTORY and 4 or 0) + (OCCUPIED_LIMIT and 1 or 0)]) or 0
local now = redis.call('TIME')
local now_ms = string.format('%s%03d', now[1], math.floor(now[2] / 1000))
local refused_joins = 0
if OCCUPIED_LIMIT and holders == 0
    and redis.call('SCARD', KEYS[3]) >= tonumber(ARGV[first + (HISTORY and 4 or 0)]) then
  refused_joins, joins = joins, 0
end
local elsewhere = -held
if sum then
  elsewhere = tonumber(sum) - held
elseif CONNECTIONS or COUNT then
  for _, count in ipairs(redis.call('HVALS', KEYS[2])) do elsewhere = elsewhere + tonumber(count) end
end

-- Presence: `value` is the entry of each user of this call, first the present one, then the new one; false: no such
-- user. `touched` are the users whose entry changes.
local value, touched = {}, {}
-- `deltas` are the envelopes to publish and the rows to write, in the order of their stamps.
local deltas, added, removed, accepted = {}, {}, {}, {}
local admitted = 0

-- Changes of `left`, by member: true is added, false is taken out.
local leaving, members_of_left = {}, {}

local function leave(member)
  leaving[member] = true
  members_of_left[#members_of_left + 1] = member
end

-- Takes the member out of `left`. Returns whether its return makes a row, and the time of its leave if that makes a row
-- before it: the shard was not read since the debounce ended, or the clock was set back and the age is unknown. A
-- leave that was not reported cancels its return, also an old one while many rows are unread.
local function comes_back(member)
  local left = leaving[member] or redis.call('ZSCORE', KEYS[6], member)
  if not left then return true end
  local age = left ~= true and tonumber(now_ms) - tonumber(left)
  leaving[member] = false
  members_of_left[#members_of_left + 1] = member
  local reported = age and (age >= debounce_ms or age < 0) and redis.call('XLEN', KEYS[5]) < MAX_OPTIONAL_ROWS
  return reported, reported and left
end

-- The parts of a user's entry: other holders than W, the user_info, and whether W is a holder.
local function parts(entry)
  local at = string.find(entry, '\n', 1, true)
  local others, mine = {}, false
  for holder in string.gmatch(string.sub(entry, 1, at - 1), '%S+') do
    if holder == W then mine = true else others[#others + 1] = holder end
  end
  return table.concat(others, ' '), string.sub(entry, at + 1), mine
end

local function put(user, entry)
  value[user] = entry
  touched[#touched + 1] = user
end

if PRESENCE and gone + joins > 0 then
  local members = redis.call('HLEN', key_of.p)
  local users = {}
  for i = 1, gone do users[i] = ARGV[12 + i] end
  for i = 1, joins do users[gone + i] = ARGV[11 + gone + 2 * i] end
  local entries = redis.call('HMGET', key_of.p, unpack(users))
  for i = 1, #users do value[users[i]] = entries[i] end

  for i = 1, gone do
    local user = users[i]
    if value[user] then
      local others, info, mine = parts(value[user])
      if mine and others ~= '' then
        put(user, others .. '\n' .. info)
      elseif mine then
        put(user, false)
        members = members - 1
        removed[#removed + 1] = i - 1
        deltas[#deltas + 1] = {MEMBER_REMOVED, user}
        if MEMBER_ROWS and DEBOUNCE then
          leave('r:' .. field .. ':' .. user)
        elseif MEMBER_ROWS then
          deltas[#deltas].row = {'member.removed', user}
        end
      end
    end
  end

  for i = 1, joins do
    local user, info = users[gone + i], ARGV[12 + gone + 2 * i]
    local announce, row = false, nil
    accepted[i] = '1'
    if not value[user] then
      if cap > 0 and members >= cap then
        accepted[i] = '0'
      else
        put(user, W .. '\n' .. info)
        members = members + 1
        announce = true
        local reported, left_ms = comes_back('r:' .. field .. ':' .. user)
        if reported and MEMBER_ROWS then
          if left_ms then deltas[#deltas + 1] = {row = {'member.removed', user, nil, left_ms}} end
          row = {'member.added', user, info}
        end
      end
    else
      local others, known, mine = parts(value[user])
      if info ~= '' and info ~= known and not (KEEP_INFO and known ~= '') then announce = true else info = known end
      if announce or not mine then
        put(user, (others == '' and W or others .. ' ' .. W) .. '\n' .. info)
      end
    end
    if announce then
      added[#added + 1] = i - 1
      deltas[#deltas + 1] = {MEMBER_ADDED, user, info, row = row}
    end
    if accepted[i] == '1' then admitted = admitted + 1 end
  end
  accepted = table.concat(accepted)
elseif CONNECTIONS and cap > 0 then
  admitted = math.max(0, math.min(joins, cap - elsewhere - base))
  accepted = string.rep('1', admitted) .. string.rep('0', joins - admitted)
else
  accepted = string.rep('1', joins)
  admitted = joins
end

if refused_joins > 0 then accepted = string.rep('2', refused_joins) end

local n = base + admitted
-- While users remain to be removed, W's field must stay: a reaper finds the users by way of it. Without a field there
-- are no such users.
if n < 1 and held > 0 and USERS_REMAIN then n = 1 end
-- The reaper never raises a count.
if gen == '-1' and n > held then n = held end

if SIGNED_IN and holders == 0 and n > 0 then
  deltas[1] = {USER_ONLINE}
elseif SIGNED_IN and held > 0 and n == 0 and holders == 1 then
  deltas[1] = {USER_OFFLINE}
end

local listed = CHANNEL or PRESENCE
local occupied = listed and holders == 0 and n > 0
local vacated = listed and held > 0 and n == 0 and holders == 1
if occupied then
  local reported, left_ms = comes_back('v:' .. field)
  if reported and OCCUPANCY_ROWS then
    table.insert(deltas, 1, {row = {'channel.occupied', nil, n}})
    if left_ms then table.insert(deltas, 1, {row = {'channel.vacated', nil, nil, left_ms}}) end
  end
end

-- The count is announced now, or the caller calls again when it may be. Without subscribers there is no count.
local total, due, announce = elsewhere + n, 0, false
if COUNT and total > 0 then
  local announced, announced_at = string.match(redis.call('GET', key_of.n) or '', '^(%d+) (%d+)$')
  -- Without `n` no count waits, so the sum was announced. Otherwise each break would announce all counts again.
  if tonumber(announced or sum) ~= total then
    local passed = now[1] * 1000 + math.floor(now[2] / 1000) - (announced_at or 0)
    local window = total > 100 and 5000 or 250
    announce = not announced or passed < 0 or passed >= window or gen == '-1' or WORKER_ENDS
    if announce then deltas[#deltas + 1] = {TOTAL, string.format('%.0f', total)} else due = window - passed end
  end
end

-- When many rows are unread, optional rows are not written, to leave room for the others.
local cached = CACHED and redis.call('GET', key_of.k)
local missed = key_of.km and not cached and admitted > 0 and redis.call('EXISTS', key_of.km) == 0
local counted = announce and COUNT_ROWS
local dropped = 0
if (missed or counted) and redis.call('XLEN', KEYS[5]) >= MAX_OPTIONAL_ROWS then
  dropped = (missed and 1 or 0) + (counted and 1 or 0)
  missed, counted = false, false
end
if counted then deltas[#deltas].row = {'subscription.count', nil, total} end
if vacated and OCCUPANCY_ROWS and DEBOUNCE then
  leave('v:' .. field)
elseif vacated and OCCUPANCY_ROWS then
  deltas[#deltas + 1] = {row = {'channel.vacated'}}
end
if missed then deltas[#deltas + 1] = {row = {'cache.miss'}} end

local epoch, top, begun, before = false, '0', false, false
local published = false
if HISTORY and refused_joins == 0 then
  local meta = redis.call('HMGET', key_of.hm, 'e', 's', 'r', 't')
  epoch, top, before = meta[1], meta[2] or '0', meta[1]
  published = meta[4]
  if (meta[3] or '') ~= ARGV[first + 3] then epoch = false end
  -- Subscribes alone may take half of the cap: anyone can subscribe, and a publish must still find room.
  begun = not epoch and (tonumber(redis.call('ZSCORE', key_of.ha, channel) or '0') > tonumber(now_ms)
    or redis.call('ZCOUNT', key_of.ha, '(' .. now_ms, '+inf') < math.ceil(tonumber(ARGV[first + 2]) / 2))
  if begun then epoch = ARGV[first] end
end

-- Nothing is checked from here on. Each delta and row gets a stamp; a call without any takes one. Stamps never repeat,
-- whatever the clock does.
local stamp = math.max(last + 1, tonumber(now[1]) * 1000000 + tonumber(now[2]))
local final = stamp + math.max(#deltas, 1) - 1
redis.call('SET', KEYS[4], string.format('%.0f', final))

for _, user in ipairs(touched) do
  if value[user] then redis.call('HSET', key_of.p, user, value[user]) else redis.call('HDEL', key_of.p, user) end
end
if (CONNECTIONS or COUNT) and total > 0 then
  redis.call('HSET', KEYS[2], SUM, string.format('%.0f', total))
elseif sum then
  redis.call('HDEL', KEYS[2], SUM)
end
if n > 0 then
  redis.call('HSET', KEYS[2], W, n)
  redis.call('HSET', KEYS[1], field, kind .. n)
else
  redis.call('HDEL', KEYS[2], W)
  redis.call('HDEL', KEYS[1], field)
end
if occupied then
  redis.call('SADD', KEYS[3], channel)
elseif vacated then
  redis.call('SREM', KEYS[3], channel)
end
for _, member in ipairs(members_of_left) do
  if leaving[member] then redis.call('ZADD', KEYS[6], now_ms, member) else redis.call('ZREM', KEYS[6], member) end
end
if missed then redis.call('SET', key_of.km, '1', 'EX', 60) end
if begun then
  -- Two epochs of a channel have no offset in common.
  top = string.format('%.0f', final)
  redis.call('HSET', key_of.hm, 'e', epoch, 's', top, 'r', ARGV[first + 3], 'b', top)
end
if epoch then
  local seconds = published and HELD_HISTORY_S or tonumber(ARGV[first + 1]) + OLD_HISTORY_S
  if before then redis.call('EXPIRE', key_of.hm, seconds, 'GT') else redis.call('EXPIRE', key_of.hm, seconds) end
  if not published then
    -- It counts towards the cap although nothing is stored in it.
    if begun then redis.call('ZREMRANGEBYSCORE', key_of.ha, '-inf', now_ms) end
    redis.call('ZADD', key_of.ha, string.format('%.0f', now_ms + seconds * 1000), channel)
    redis.call('EXPIRE', key_of.ha, 5184000)
  end
end
if HISTORY_ENDS and holders == (held > 0 and 1 or 0) and n == 0 and redis.call('EXISTS', key_of.hm) == 1 then
  local kept_s = redis.call('HGET', key_of.hm, 't')
  if kept_s then
    redis.call('EXPIRE', key_of.hm, kept_s + OLD_HISTORY_S, 'LT')
  else
    redis.call('EXPIRE', key_of.hm, EMPTY_HISTORY_S)
    redis.call('ZADD', key_of.ha, string.format('%.0f', now_ms + EMPTY_HISTORY_S * 1000), channel)
  end
end
if announce then
  redis.call('SET', key_of.n, string.format('%.0f ', total) .. now_ms, 'EX', 60)
elseif due > 0 then
  -- The caller may be cut off for longer than a minute before it calls again.
  redis.call('EXPIRE', key_of.n, 86400)
elseif COUNT and total == 0 then
  redis.call('DEL', key_of.n)
end

for i, delta in ipairs(deltas) do
  local id = string.format('%.0f', stamp + i - 1)
  local head = (delta[1] or '') .. ' ' .. W .. ' ' .. id
  if delta[1] == MEMBER_ADDED then
    redis.call(command, topic, head .. ' ' .. #delta[2] .. '\n' .. delta[2] .. delta[3])
  elseif delta[1] == MEMBER_REMOVED then
    redis.call(command, topic, head .. '\n' .. delta[2])
  elseif delta[1] == TOTAL then
    redis.call(command, topic, head .. ' ' .. delta[2])
  elseif delta[1] then
    redis.call(command, topic, head)
  end
  if delta.row then
    local event, user, detail = delta.row[1], delta.row[2], delta.row[3]
    local row = {'k', event, 'a', ARGV[5], 'c', channel, 't', delta.row[4] or now_ms}
    for _, extra in ipairs({{'u', user}, {'x', detail}}) do
      if extra[2] and extra[2] ~= '' then
        row[#row + 1] = extra[1]
        row[#row + 1] = extra[2]
      end
    end
    redis.call('XADD', KEYS[5], 'MAXLEN', '~', MAX_ROWS, id .. '-0', unpack(row))
  end
end

local reply = {'OK', string.format('%.0f', final), accepted, added, removed}
if ROSTER then reply[#reply + 1] = redis.call('HGETALL', key_of.p) end
if CACHED then reply[#reply + 1] = cached end
if HISTORY then
  reply[#reply + 1] = epoch
  reply[#reply + 1] = top
end
if COUNT then
  reply[#reply + 1] = total
  reply[#reply + 1] = due
end
if COUNT_ROWS or CACHE_MISS_ROWS then reply[#reply + 1] = dropped end
return reply
