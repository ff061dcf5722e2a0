-- KEYS turn, events; ARGV events_length, event, held (1: hold, 0: release).
-- Tells the turn's owner to hold or release it, if the turn has one, and the record keeps it for an owner
-- who comes later. Returns the turn's state or an empty string.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return '' end
if state == 'claimed' or state == 'running' or state == 'paused' then
  redis.call('HSET', KEYS[1], 'held', ARGV[3])
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[1], '*', 'e', ARGV[2])
end
return state
