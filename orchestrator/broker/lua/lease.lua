-- KEYS lease, fence, state; ARGV action, lease_value or owner, ttl_ms.
-- acquire: the new fencing number, or 0 while somebody else holds the lease. Safe to repeat: whoever holds
-- it already gets it again, under a new number.
-- renew, release: 1 when the lease was still ours, else 0. With the lease goes what its owner published of
-- the backend, so that nobody takes it for the next owner's.
local held = redis.call('GET', KEYS[1])
if ARGV[1] == 'acquire' then
  if held and string.match(held, '^%d+:(.*)$') ~= ARGV[2] then return 0 end
  local fence = redis.call('INCR', KEYS[2])
  redis.call('SET', KEYS[1], fence .. ':' .. ARGV[2], 'PX', ARGV[3])
  return fence
end
if held ~= ARGV[2] then return 0 end
if ARGV[1] == 'renew' then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
  redis.call('DEL', KEYS[1], KEYS[3])
end
return 1
