-- tick: the scaler looks at the queue, and keeps its timers running where nobody claims.
-- ARGV   2 worker that its host saw die ('' : none): certain knowledge, so its lease is not waited for
-- reply  {waiting per class (4), waiting tokens, running, ms the longest waiter has waited, claims of the dead left,
--         dead letters, workers alive, whether the model is paused, classes that are shed}
-- Repeat: safe. Cost O(log n), and O(claims of the dead).
hear()
local left = 0
if ARGV[2] ~= '' and not bury(ARGV[2], 1024, true) then left = 1 end
timers(256)
local oldest = 0
for _, class_tenant in ipairs(call('ZRANGE', TENANTS, 0, 15)) do
  local row = row_of(id_of(head(class_tenant)))
  oldest = math.max(oldest, now - row.entered_ms)
end
return {
  counter('waiting0'), counter('waiting1'), counter('waiting2'), counter('waiting3'),
  counter('waiting_tokens'), call('ZCARD', CLAIMS), oldest, left, call('ZCARD', DEAD), call('ZCARD', LEASES),
  stopped().paused and 1 or 0, stopped().shed,
}
