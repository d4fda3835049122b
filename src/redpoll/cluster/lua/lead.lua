#!lua flags=allow-oom
-- A node's heartbeat: stores what its supervisor says about the node, and decides which node leads.
--
-- KEYS  1 nodes   run → the node as JSON
--       2 leader  '<run> <term> <beat>'; the run '-': the leader ended, and any node may lead
--       3 drained  run → seconds, of the nodes that an operator drains; '-' once one is undrained
-- ARGV  1 run  2 the node as JSON, or '': the run ends  3 the id of its record store
--       4 1: it may become the leader, 0: it may not, -: it gives the lead up if it has it
--       5 the value of `leader` that it may replace, or ''  6 the greatest term that it has seen
--       7 its fitness: it doesn't become the leader while a fitter node lives
--       8 … runs that it found dead
-- Returns {'OK' or 'REFUSED', leader or '', nodes, flat, the run's entry in drained or '', 1 if the run was in nodes
--         before}. REFUSED: a node that isn't known to be dead has another record store, so this run was not added.

local leader = redis.call('GET', KEYS[2]) or ''
local name, term, beat = string.match(leader, '^(%S+) (%d+) (%d+)$')
term = tonumber(term or '0')
local seen = tonumber(ARGV[6])

local function lead(run, new_term, new_beat)
  leader = string.format('%s %.0f %.0f', run, new_term, new_beat)
  redis.call('SET', KEYS[2], leader)
end

if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  if name == ARGV[1] then lead('-', term, 0) end
  return {'OK', leader, {}, '', 1}
end

local dead = {}
for i = 8, #ARGV do dead[ARGV[i]] = true end

local function is_outdone()
  local nodes = redis.call('HGETALL', KEYS[1])
  for i = 1, #nodes, 2 do
    -- The leader that it replaces is dead, or an earlier run of this node.
    if nodes[i] ~= ARGV[1] and nodes[i] ~= name and not dead[nodes[i]] then
      local node = cjson.decode(nodes[i + 1])
      if (node['lifecycle'] or 'serving') == 'serving' and (node['fitness'] or 2) > tonumber(ARGV[7]) then return true end
    end
  end
  return false
end

local known = redis.call('HEXISTS', KEYS[1], ARGV[1])
if known == 0 then
  local nodes = redis.call('HGETALL', KEYS[1])
  for i = 1, #nodes, 2 do
    if not dead[nodes[i]] and cjson.decode(nodes[i + 1])['store'] ~= ARGV[3] then
      return {'REFUSED', leader, nodes, '', 0}
    end
  end
end

redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if name == ARGV[1] and ARGV[4] == '-' then
  lead('-', term, 0)
elseif name == ARGV[1] then
  lead(name, seen > term and seen + 1 or term, tonumber(beat) + 1)
elseif ARGV[4] == '1' and (not name or name == '-' or leader == ARGV[5]) and not is_outdone() then
  lead(ARGV[1], math.max(term, seen) + 1, 1)
end
return {'OK', leader, redis.call('HGETALL', KEYS[1]), redis.call('HGET', KEYS[3], ARGV[1]) or '', known}
