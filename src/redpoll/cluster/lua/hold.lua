#!lua flags=allow-oom
-- What one worker holds of one channel, told in absolute values: join, leave, re-assertion and reaping
-- are this one step (cluster.md 5). Everything is read and decided before the first write.
--
-- KEYS  1 w      this worker's hash in the channel's shard
--       2 c      the channel's counts by worker
--       3 a      the app's occupied channels in the shard
--       4 clock  the shard's last stamp
--       5 out    the shard's rows for webhooks
--       6 left   what is to become such a row unless it comes back before
--       then p      the channel's users (kind p)
--       then n      the count last told, and when (flag s)
--       then k      the cached event (flag c)
--       then km     that nothing is cached was told (flags c and X)
--       then hm ha  the epoch and last offset of the channel's history; the app's channels with history (flag h)
-- ARGV  1 W  2 gen (-1: the reaper's)
--       3 kind   c: plain, p: presence, u: a user's signed-in connections, q: an app's connections
--       4 flags  r the reply carries the roster
--                u users of W remain to be removed after this call
--                k a known user's info stays as it is
--                s subscribers are told how many they are
--                e W ends: there is no later call to tell a count in
--                c the reply carries the cached event
--                h the reply carries epoch and last offset of the channel's history, which is begun if need be
--                o m S X  rows are written: channel.occupied and .vacated; member.added and .removed;
--                  subscription.count (with s); cache.miss (with c)
--                d vacated and removed wait in `left`
--       5 app id  6 channel  7 base (sockets attached that stay)
--       8 cap on users (p) or on the sum of all counts (q); 0: none
--       9 topic  10 PUBLISH or SPUBLISH  11 number of gone users  12 number of joins
--       13… the gone users, then for kind p a user and an info per join, then for flag h the epoch if the
--       channel has none of this era, the s that its messages are kept, the cap on the app's channels with
--       history in this shard, and the era
-- Returns {'OK', stamp, accepted, added, removed[, roster][, cached][, epoch, top][, total, due][, dropped]}:
--         accepted is a digit per join, added counts joins and removed counts gone users, both from 0; the
--         roster is p, flat; cached is an envelope's tail or nil; epoch is nil where the cap leaves no history,
--         top the offset behind which the next message comes; total is the sum of all counts, due the ms until it may be told, 0 if
--         everybody was told; dropped (flags S, X) is the number of rows not written, since too many others
--         wait. Or {'FENCED'}, {'STALE'}.

local W, gen, kind, flags = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local channel, base, cap = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local topic, command = ARGV[9], ARGV[10]
local gone, joins = tonumber(ARGV[11]), tonumber(ARGV[12])
local field = ARGV[5] .. ':' .. channel

local stored = redis.call('HGET', KEYS[1], 'gen')
if not stored or (stored == '-1' and gen ~= '-1') then return {'FENCED'} end
if stored ~= gen then return {'STALE'} end

local function flag(letter) return string.find(flags, letter, 1, true) ~= nil end

local key_of, at = {}, 6
for _, each in ipairs({{'p', kind == 'p'}, {'n', flag('s')}, {'k', flag('c')}, {'km', flag('c') and flag('X')},
                       {'hm', flag('h')}, {'ha', flag('h')}}) do
  if each[2] then
    at = at + 1
    key_of[each[1]] = KEYS[at]
  end
end

local last = tonumber(redis.call('GET', KEYS[4]) or '0')
local held = tonumber(redis.call('HGET', KEYS[2], W) or '0')
local holders = redis.call('HLEN', KEYS[2])
local elsewhere = -held
if kind == 'q' or flag('s') then
  for _, count in ipairs(redis.call('HVALS', KEYS[2])) do elsewhere = elsewhere + tonumber(count) end
end

-- Presence: `value` is each named user's field as it stands, then as it is to be; false: no such user.
local value, touched = {}, {}
local deltas, added, removed, accepted = {}, {}, {}, {}
local admitted = 0

-- What becomes a row at a later time, unless it is taken back until then: by member of `left`, true for now,
-- false for taken back.
local leaving, members_of_left = {}, {}

local function leave(member)
  leaving[member] = true
  members_of_left[#members_of_left + 1] = member
end

-- Whether it had left without anybody being told: then nobody is told of its return.
local function comes_back(member)
  local left = leaving[member] or redis.call('ZSCORE', KEYS[6], member)
  if left then
    leaving[member] = false
    members_of_left[#members_of_left + 1] = member
  end
  return left
end

-- Other holders than W as a string, the info, and whether W is a holder.
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

if kind == 'p' and gone + joins > 0 then
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
        deltas[#deltas + 1] = {'r', user}
        if flag('m') and flag('d') then
          leave('r:' .. field .. ':' .. user)
        elseif flag('m') then
          deltas[#deltas].row = {'member.removed', user}
        end
      end
    end
  end

  for i = 1, joins do
    local user, info = users[gone + i], ARGV[12 + gone + 2 * i]
    local tell, row = false, nil
    accepted[i] = '1'
    if not value[user] then
      if cap > 0 and members >= cap then
        accepted[i] = '0'
      else
        put(user, W .. '\n' .. info)
        members = members + 1
        tell = true
        if not comes_back('r:' .. field .. ':' .. user) and flag('m') then row = {'member.added', user, info} end
      end
    else
      local others, known, mine = parts(value[user])
      if info ~= '' and info ~= known and not (flag('k') and known ~= '') then tell = true else info = known end
      if tell or not mine then
        put(user, (others == '' and W or others .. ' ' .. W) .. '\n' .. info)
      end
    end
    if tell then
      added[#added + 1] = i - 1
      deltas[#deltas + 1] = {'m', user, info, row = row}
    end
    if accepted[i] == '1' then admitted = admitted + 1 end
  end
  accepted = table.concat(accepted)
elseif kind == 'q' and cap > 0 then
  admitted = math.max(0, math.min(joins, cap - elsewhere - base))
  accepted = string.rep('1', admitted) .. string.rep('0', joins - admitted)
else
  accepted = string.rep('1', joins)
  admitted = joins
end

local n = base + admitted
-- The floor keeps W's field, and with it the way to the users that are still to be removed. Where there is no
-- field, there are no such users.
if n < 1 and held > 0 and flag('u') then n = 1 end
if gen == '-1' and n > held then n = held end

if kind == 'u' and holders == 0 and n > 0 then
  deltas[1] = {'o'}
elseif kind == 'u' and held > 0 and n == 0 and holders == 1 then
  deltas[1] = {'f'}
end

local listed = kind == 'c' or kind == 'p'
local occupied = listed and holders == 0 and n > 0
local vacated = listed and held > 0 and n == 0 and holders == 1
if occupied and not comes_back('v:' .. field) and flag('o') then
  table.insert(deltas, 1, {row = {'channel.occupied', nil, n}})
end

local now = redis.call('TIME')
local now_ms = string.format('%s%03d', now[1], math.floor(now[2] / 1000))
-- The count is told now, or the caller calls again when it may be; with nobody left there is none to tell.
local total, due, tell = elsewhere + n, 0, false
if flag('s') and total > 0 then
  local said, told_at = string.match(redis.call('GET', key_of.n) or '', '^(%d+) (%d+)$')
  if tonumber(said) ~= total then
    local passed = now[1] * 1000 + math.floor(now[2] / 1000) - (told_at or 0)
    local window = total > 100 and 5000 or 250
    tell = not said or passed < 0 or passed >= window or gen == '-1' or flag('e')
    if tell then deltas[#deltas + 1] = {'n', string.format('%.0f', total)} else due = window - passed end
  end
end

-- Rows that can be done without are not written when many wait, to leave room for the others.
local cached = flag('c') and redis.call('GET', key_of.k)
local missed = key_of.km and not cached and admitted > 0 and redis.call('EXISTS', key_of.km) == 0
local counted = tell and flag('S')
local dropped = 0
if (missed or counted) and redis.call('XLEN', KEYS[5]) >= 10000 then
  dropped = (missed and 1 or 0) + (counted and 1 or 0)
  missed, counted = false, false
end
if counted then deltas[#deltas].row = {'subscription.count', nil, total} end
if vacated and flag('o') and flag('d') then
  leave('v:' .. field)
elseif vacated and flag('o') then
  deltas[#deltas + 1] = {row = {'channel.vacated'}}
end
if missed then deltas[#deltas + 1] = {row = {'cache.miss'}} end

local epoch, top, begun, before = false, '0', false, false
local kept = 13 + gone + (kind == 'p' and 2 * joins or 0)
if flag('h') then
  local meta = redis.call('HMGET', key_of.hm, 'e', 's', 'r')
  epoch, top, before = meta[1], meta[2] or '0', meta[1]
  if (meta[3] or '') ~= ARGV[kept + 3] then epoch = false end
  begun = not epoch and (tonumber(redis.call('ZSCORE', key_of.ha, channel) or '0') > tonumber(now_ms)
    or redis.call('ZCOUNT', key_of.ha, '(' .. now_ms, '+inf') < tonumber(ARGV[kept + 2]))
  if begun then epoch = ARGV[kept] end
end

-- A stamp for each delta and row, and one for a call without any. They never repeat, whatever the clock does.
local stamp = math.max(last + 1, tonumber(now[1]) * 1000000 + tonumber(now[2]))
local final = stamp + math.max(#deltas, 1) - 1
redis.call('SET', KEYS[4], string.format('%.0f', final))

for _, user in ipairs(touched) do
  if value[user] then redis.call('HSET', key_of.p, user, value[user]) else redis.call('HDEL', key_of.p, user) end
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
  redis.call('HSET', key_of.hm, 'e', epoch, 's', top, 'r', ARGV[kept + 3])
end
if epoch then
  -- Where something was published, longer than a rule keeps it.
  local seconds = tonumber(ARGV[kept + 1]) + 86400
  if before then redis.call('EXPIRE', key_of.hm, seconds, 'GT') else redis.call('EXPIRE', key_of.hm, seconds) end
end
if tell then
  redis.call('SET', key_of.n, string.format('%.0f ', total) .. now_ms, 'EX', 60)
elseif flag('s') and total == 0 then
  redis.call('DEL', key_of.n)
end

for i, delta in ipairs(deltas) do
  local id = string.format('%.0f', stamp + i - 1)
  local head = (delta[1] or '') .. ' ' .. W .. ' ' .. id
  if delta[1] == 'm' then
    redis.call(command, topic, head .. ' ' .. #delta[2] .. '\n' .. delta[2] .. delta[3])
  elseif delta[1] == 'r' then
    redis.call(command, topic, head .. '\n' .. delta[2])
  elseif delta[1] == 'n' then
    redis.call(command, topic, head .. ' ' .. delta[2])
  elseif delta[1] then
    redis.call(command, topic, head)
  end
  if delta.row then
    local event, user, detail = delta.row[1], delta.row[2], delta.row[3]
    local row = {'k', event, 'a', ARGV[5], 'c', channel, 't', now_ms}
    for _, each in ipairs({{'u', user}, {'x', detail}}) do
      if each[2] and each[2] ~= '' then
        row[#row + 1] = each[1]
        row[#row + 1] = each[2]
      end
    end
    redis.call('XADD', KEYS[5], 'MAXLEN', '~', 20000, id .. '-0', unpack(row))
  end
end

local reply = {'OK', string.format('%.0f', final), accepted, added, removed}
if flag('r') then reply[#reply + 1] = redis.call('HGETALL', key_of.p) end
if flag('c') then reply[#reply + 1] = cached end
if flag('h') then
  reply[#reply + 1] = epoch
  reply[#reply + 1] = top
end
if flag('s') then
  reply[#reply + 1] = total
  reply[#reply + 1] = due
end
if flag('S') or flag('X') then reply[#reply + 1] = dropped end
return reply
