#!/bin/sh
# nvcc_log.sh COMPILER... : runs a compile of nvcc and keeps what it prints in OBJECT.log; shows it when the compile fails
# or warns. The lines of ptxas -v stay in the log.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" >"$object.log" 2>&1
code=$?
grep -vE "^ptxas info|bytes stack frame|^$" "$object.log" >&2
exit $code
