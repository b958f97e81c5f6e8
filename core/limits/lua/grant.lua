-- grant: the grants and entries of an organisation come to so much now.
-- KEYS   1 money HASH
-- ARGV   1 granted, units beside 3   2 number of grants in it   3 granted, whole ones of the currency
-- reply  1 | 0 there is no lease, or it knows of a newer sum                                         cost O(1)
-- Repeat: safe.
local grants = call('HGET', KEYS[1], 'grants')
if not grants or tonumber(grants) > tonumber(ARGV[2]) then return 0 end
call('HSET', KEYS[1], 'granted', ARGV[1], 'grants', ARGV[2], 'granted_whole', ARGV[3])
return 1
