#!lua flags=no-writes
-- Counts an app's occupied channels in one shard, and says of some channels whether they are among them, in one step.
--
-- KEYS  1 a  the app's occupied channels in the shard
-- ARGV  channels
-- Returns {their number, then for each channel of ARGV 1 if it is occupied, 0 if not}.

local reply = {redis.call('SCARD', KEYS[1])}
for i, channel in ipairs(ARGV) do reply[i + 1] = redis.call('SISMEMBER', KEYS[1], channel) end
return reply
