-- KEYS turn, timeline, queue, seq, events; ARGV id, max_waiting, base_score, active_ttl_s,
-- events_length, event_head, timeline_entry, then the record's field/value pairs.
-- Returns the arrival number, 0 when the queue is full, -1 when the id is taken.
if redis.call('EXISTS', KEYS[1]) == 1 then return -1 end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[2]) then return 0 end
local seq = redis.call('INCR', KEYS[4])
redis.call('HSET', KEYS[1], 'state', 'queued', 'seq', seq, unpack(ARGV, 8))
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('RPUSH', KEYS[2], ARGV[7])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('ZADD', KEYS[3], string.format('%.0f', tonumber(ARGV[3]) + seq), ARGV[1])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[6] .. ',"seq":' .. seq .. '}')
return seq
