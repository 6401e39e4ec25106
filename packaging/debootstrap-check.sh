#!/bin/bash
# Proves `make demo` and `make test` on a fresh Debian: a debootstrap root with git, make and python3
# and nothing else, in which the repository's HEAD is cloned and make is run by chroot.
#
#   packaging/debootstrap-check.sh SUITE [FOLDER] [MAKE TARGET ...]
#
# SUITE is bookworm or trixie; FOLDER holds the root (default /var/tmp/hsfs-debootstrap/SUITE) and is
# kept, so that the next run is quicker: remove it for a really fresh one. Default targets: demo test.
# PYTEST_ARGS is passed on. Needs root. The mirror and the registries' settings are this machine's.
set -euo pipefail

suite=${1:?usage: debootstrap-check.sh SUITE [FOLDER] [MAKE TARGET ...]}
root=${2:-/var/tmp/hsfs-debootstrap/$suite}
shift $(($# > 2 ? 2 : $#))
targets=("$@")
((${#targets[@]})) || targets=(demo test)
repository=$(cd "$(dirname "$0")/.." && pwd)
[[ $EUID == 0 ]] || { echo "debootstrap-check: needs root" >&2; exit 1; }

# The first archive of this machine's apt sources (either format) that is Debian's own.
mirror() {
    local uri
    for uri in $(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
        sed -nE -e 's/^URIs:[[:space:]]*([^[:space:]]+).*/\1/p' \
                -e 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+).*/\2/p'); do
        [[ $uri != *security* && $uri =~ /debian/?$ ]] && { echo "$uri"; return; }
    done
    echo "debootstrap-check: no Debian archive in /etc/apt" >&2
    return 1
}

mkdir -p "$root"
root=$(cd "$root" && pwd)
stamp=$root/.debootstrap-done
if [[ ! -e $stamp ]]; then
    command -v debootstrap >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends debootstrap
    from=$(mirror)
    debootstrap --variant=minbase --include=git,make,python3,ca-certificates "$suite" "$root" "$from"
    echo "deb $from $suite main" >"$root/etc/apt/sources.list"
    touch "$stamp"
fi

# How this machine reaches its registries: names, proxies, certificates, pip's configuration.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    if [[ -r $file ]]; then
        rm -f "$root$file"
        install -D -m 644 "$(readlink -f "$file")" "$root$file"
    fi
done
grep -lsiE '^[[:space:]]*Acquire' /etc/apt/apt.conf /etc/apt/apt.conf.d/* |
    while read -r file; do install -D -m 644 "$file" "$root$file"; done || true

work=/root/hsfs
rm -rf "${root:?}$work"
git clone -q --no-hardlinks "$repository" "$root$work"
echo "debootstrap-check: $suite, commit $(git -C "$root$work" rev-parse --short HEAD), in $root"

# The settings of pip, uv, proxies and certificates; nothing else of this machine's environment.
settings=()
while IFS= read -r -d '' pair; do
    case ${pair%%=*} in
        PIP_* | UV_* | SSL_CERT_FILE | REQUESTS_CA_BUNDLE | PYTEST_ARGS | \
            http_proxy | https_proxy | no_proxy | HTTP_PROXY | HTTPS_PROXY | NO_PROXY)
            settings+=("$pair") ;;
    esac
done < <(env -0)

# A private mount and pid namespace: mounts and processes are gone with it, however it ends.
inside=$(cat <<'INSIDE'
set -euo pipefail
root=$1 work=$2
shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -p "$root/run/lock"
cd "$root"
chroot "$root" /bin/bash -euo pipefail -c '
    cd "$1"
    shift
    for target in "$@"; do
        began=$SECONDS
        echo "== make $target"
        make --no-print-directory "$target"
        echo "== make $target: $((SECONDS - began)) s"
    done
    began=$SECONDS
    make --no-print-directory setup
    echo "== make setup again: $((SECONDS - began)) s"
' check "$work" "$@"
INSIDE
)
exec env -i "${settings[@]}" HOME=/root LC_ALL=C.UTF-8 TERM="${TERM:-dumb}" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    unshare --mount --pid --fork --kill-child --propagation private -- \
    /bin/bash -c "$inside" inside "$root" "$work" "${targets[@]}" </dev/null
