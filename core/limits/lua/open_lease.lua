-- open_lease: let a scope's money be spent, from figures of Postgres on.
-- KEYS   1 money HASH   2 leases HASH
-- ARGV   1 scope   2 number of the last ingest in the figures   3 granted   4 number of grants   5 spent   6 day
--        7 spent on it   8 month   9 spent in it   10 since when spent counts, ms   11 granted and 12 spent, in whole
--        ones of the currency, beside the units of 3 and 5
-- reply  1 opened | 0 it was open, or a later ingest has been charged: its figures are the newer      cost O(1)
-- Repeat: safe. The lock that the figures were read under may be lost before they come here; `ingested` is the fence.
if call('HEXISTS', KEYS[1], 'lease') == 1 then return 0 end
if tonumber(call('HGET', KEYS[2], 'ingested') or 0) > tonumber(ARGV[2]) then return 0 end
call('HSET', KEYS[1], 'lease', ARGV[2], 'granted', ARGV[3], 'grants', ARGV[4], 'spent', ARGV[5], 'held', 0,
  'day', ARGV[6], 'day_spent', ARGV[7], 'month', ARGV[8], 'month_spent', ARGV[9], 'since', ARGV[10],
  'granted_whole', ARGV[11], 'spent_whole', ARGV[12])
call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
