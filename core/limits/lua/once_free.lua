-- once_free: the request was refused, so its key stands for nothing.
-- KEYS   1 entry HASH {id, body, begun, r:<reader>}
-- ARGV   1 request id
-- reply  1 freed | 0 it was not this request's                                                    cost O(1)
-- Repeat: safe.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
