-- account: a scope's money as it is now. Writes nothing.
-- KEYS   1 money HASH
-- reply  {granted, spent: each in whole ones of the currency and units beside them; held, spent today, this month} as
--        decimal strings | {} there is no lease                                                      cost O(1)
local a = account(KEYS[1])
if not a then return {} end
local reply = {}
for i, units in ipairs({ a.granted_whole, a.granted, a.spent_whole, a.spent, a.held, a.day_spent, a.month_spent }) do
  reply[i] = string.format('%.0f', units)
end
return reply
