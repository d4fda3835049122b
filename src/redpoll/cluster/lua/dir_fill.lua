#!lua
-- One step of writing the whole directory. The directory has no version from the first step to the last one, so no
-- worker reads half of it.
--
-- KEYS  1 dir      records by app id
--       2 dirver   '<version> <number of records> <id of the version>'
--       3 leader   '<run> <term> <beat>'
-- ARGV  1 '<run> <term> ' of the caller, or empty: nobody else writes
--       2 begin | put, then app ids and records by turns | drop, then app ids
--         | end, then the version, its id, PUBLISH or SPUBLISH, the topic sys, the message
-- Returns the app ids in dir (begin) or 1; nil if another node leads.

local leader = redis.call('GET', KEYS[3])
if ARGV[1] ~= '' and leader and string.sub(leader, 1, #ARGV[1]) ~= ARGV[1] then return nil end
local step = ARGV[2]
if step == 'begin' then
  redis.call('DEL', KEYS[2])
  return redis.call('HKEYS', KEYS[1])
elseif step == 'put' then
  redis.call('HSET', KEYS[1], unpack(ARGV, 3))
elseif step == 'drop' then
  redis.call('HDEL', KEYS[1], unpack(ARGV, 3))
else
  redis.call('SET', KEYS[2], string.format('%s %d %s', ARGV[3], redis.call('HLEN', KEYS[1]), ARGV[4]))
  redis.call(ARGV[5], ARGV[6], ARGV[7])
end
return 1
