#!/bin/bash
# Licensed under the Apache License, Version 2.0. See LICENSE.
#
# The DFL driver on a real kernel with an emulated card: dfl_on_kernel.sh KIT
#
# KIT is the directory of the hil kit; its VM is started with a card of two
# ports and stopped afterwards, unless it is up already. The transcript goes to standard output.
cd "$(dirname "$0")/../.." || exit 1
KIT=$1
HIL_HOME=${HIL_HOME:-$HOME/.cache/nova-hil}
FAILED=0
SITE=$("$KIT/hil" run 'ls -d /opt/nova/lib/python3*/site-packages' 2> /dev/null)
A=11111111-2222-4333-8444-555555555555
B=aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee
C=cccccccc-0000-4ccc-8ddd-eeeeeeeeeeee
OTHER=00000000-1111-4222-8333-444444444444

hex() { echo "${1//-/}"; }
card() { echo "# the card: $1"; echo "$1" > "$HIL_HOME/run/fpga.json"; }
step() {
  "$KIT/hil" run -t 200 "PYTHONWARNINGS=ignore /opt/nova/bin/python /var/tmp/dfl_on_kernel.py $*" \
    2>&1 || FAILED=1
}

if [[ -z $SITE ]]; then
  config=$(mktemp); echo '{"ports": 2}' > "$config"
  trap '"$KIT/hil" down > /dev/null' EXIT
  "$KIT/hil" up --devices fpga --fpga-config "$config" || exit 1
  rm "$config"
  SITE=$("$KIT/hil" run 'ls -d /opt/nova/lib/python3*/site-packages')
fi
tree=$(mktemp -d)
cp -r nova_accel "$tree"; find "$tree" -name __pycache__ -prune -exec rm -r {} +
"$KIT/hil" run "rm -rf $SITE/nova_accel"
"$KIT/hil" put "$tree/nova_accel" "$SITE/"
"$KIT/hil" put tests/lab/dfl_on_kernel.py /var/tmp/
rm -r "$tree"

"$KIT/hil" run 'uname -sr'
step discover
card '{"ports": 2}'
step program 0 $A --expect "$(hex $A)"
step program 1 $B --expect "$(hex $B)"
step program 0 $C --interface $OTHER --expect IncompatibleBitstream
step program 0 $C --payload-interface $OTHER --expect ProgrammingFailed
for error in operation crc protocol fifo timeout; do
  card "{\"ports\": 2, \"pr_error\": \"$error\", \"pr_error_count\": 1}"
  step program 0 $C --expect ProgrammingFailed
done
step program 0 $C --expect "$(hex $C)"
card '{"ports": 2, "pr_error": "crc", "pr_error_count": 1}'
step stuck 0 $B
card '{"ports": 2, "pr_seconds": 3}'
step program 0 $A --size 300001 --expect "$(hex $A)"
card '{"ports": 2}'
step guest
step privileged
step release 1 $C
"$KIT/hil" run 'dmesg | grep -i dfl | tail -20'
[[ $FAILED = 0 ]] && echo 'all as expected' || echo 'NOT all as expected'
exit $FAILED
