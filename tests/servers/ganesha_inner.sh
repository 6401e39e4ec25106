#!/bin/sh
# Process 1 of a private pid and mount namespace: rpcbind and NFS-Ganesha.
#   ganesha_inner.sh CONFIG LOG
# Ganesha does not start without an rpcbind to register with. It gets one that nobody else sees: its
# socket lies on a private /run, and its TCP and UDP ports in an empty network namespace.
# End of file on standard input means that the launcher is gone: then all ends.
set -eu
config=$1 log=$2
mount -t tmpfs tmpfs /run
mkdir -p /run/rpcbind /run/ganesha /run/lock
unshare --net rpcbind -f -w </dev/null &
i=0
while [ ! -S /run/rpcbind.sock ]; do
    i=$((i + 1))
    [ "$i" -lt 1200 ] || { echo "rpcbind did not start" >&2; exit 1; }
    sleep 0.05
done
exec 4<&0
ganesha.nfsd -F -f "$config" -L "$log" -p /run/ganesha.pid -N NIV_EVENT </dev/null 4<&- &
server=$!
# dash gives a background command /dev/null as its input unless told otherwise, hence <&4.
{ cat >/dev/null; kill -KILL "$server"; } <&4 &
rc=0
wait "$server" || rc=$?
exit "$rc"
