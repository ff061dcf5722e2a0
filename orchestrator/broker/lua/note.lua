-- KEYS turn, timeline, lease; ARGV lease_value, state, timeline_entry, then field/value pairs.
-- Writes a timeline line and record fields of a turn that is in `state`, and leaves the state as it is.
-- Safe to repeat. Returns 'ok', 'deposed', or the present state when it is another one.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 'deposed' end
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= ARGV[2] then return state or 'missing' end
if redis.call('LINDEX', KEYS[2], -1) == ARGV[3] then return 'ok' end
redis.call('RPUSH', KEYS[2], ARGV[3])
if ARGV[4] then redis.call('HSET', KEYS[1], unpack(ARGV, 4)) end
return 'ok'
