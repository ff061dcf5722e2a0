-- KEYS turn, events; ARGV events_length, event.
-- Tells the turn's owner something, if the turn has one. Returns the turn's state or an empty string.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return '' end
if state == 'claimed' or state == 'running' or state == 'paused' then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[1], '*', 'e', ARGV[2])
end
return state
