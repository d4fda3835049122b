#!lua flags=allow-oom
-- Deletes a channel's history and informs its subscribers, in one step. A new epoch begins; offsets keep growing.
--
-- KEYS  1 h   the channel's messages
--       2 hm  its epoch and last offset
--       3 ha  the app's channels with history in the shard
-- ARGV  1 PUBLISH or SPUBLISH  2 topic  3 new epoch  4 channel
-- Returns 1; 0 if the channel has no history.

if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[2], 'e', ARGV[3])
-- The next message creates a new stream, whose expiry publish.lua must set. A channel that had ended is open again.
redis.call('HDEL', KEYS[2], 'x', 'b', 'z')
redis.call('ZREM', KEYS[3], ARGV[4])
-- The envelope HISTORY_CLEARED (envelopes.py).
redis.call(ARGV[1], ARGV[2], 'x ' .. ARGV[3])
return 1
