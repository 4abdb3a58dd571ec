#!/usr/bin/env bash
# Builds a real Kubernetes control plane (kube-apiserver, kube-controller-manager, kube-scheduler, etcd)
# from Debian's source packages, once per machine. Prints the folder of the binaries, for use as
# KUBEBUILDER_ASSETS.
#
#   hack/control-plane.sh           build if missing; the last line of stdout is the folder
#   KUBEBUILDER_ASSETS=DIR ...      use the binaries in DIR and build nothing
#
# Needs: Debian (bookworm), root or sudo for the build packages, about 4 GB of disk and 6 minutes on 2 cores.
set -euo pipefail

KUBE_VERSION=v1.20.2
# modern-go/reflect2 1.0.1, vendored by 1.20.2, crashes with Go >= 1.18 as soon as a custom resource is created.
PACKAGES=(golang-1.19-go dpkg-dev rsync jq golang-github-modern-go-reflect2-dev etcd-server)
BINARIES=(kube-apiserver kube-controller-manager kube-scheduler)

say() { echo "control-plane: $*" >&2; }
complete() { for b in etcd "${BINARIES[@]}"; do [ -x "$1/$b" ] || return 1; done; }

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
    complete "$KUBEBUILDER_ASSETS" || { say "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS lacks one of: etcd ${BINARIES[*]}"; exit 1; }
    say "using KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS"
    echo "$KUBEBUILDER_ASSETS"
    exit 0
fi

cache="${XDG_CACHE_HOME:-$HOME/.cache}/baton/control-plane"
assets="$cache/$KUBE_VERSION"
if complete "$assets"; then
    say "already built: $assets"
    echo "$assets"
    exit 0
fi
command -v apt-get >/dev/null || { say "needs Debian's apt-get; or set KUBEBUILDER_ASSETS to a folder with the binaries"; exit 1; }
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo

mkdir -p "$cache"
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work"' EXIT

# A private list of source entries, so that the machine's apt configuration does not change.
mkdir -p "$work/apt/sources" "$work/apt/lists/partial"
for f in /etc/apt/sources.list.d/*.sources; do
    [ -e "$f" ] && grep -q 'debian-archive-keyring' "$f" && sed 's/^Types:.*/Types: deb-src/' "$f" >"$work/apt/sources/$(basename "$f")"
done
if [ -s /etc/apt/sources.list ]; then
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$work/apt/sources/main.list"
fi
chmod -R a+rX "$work"
src_apt=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$work/apt/sources" -o "Dir::State::lists=$work/apt/lists"
         -o "APT::Sandbox::User=root" -o "Dir::Cache::srcpkgcache=" -o "Dir::Cache::pkgcache=")

say "installing ${PACKAGES[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get -qq update >&2
# On machines with an init system the package also starts an etcd service. Only the binary is used here.
$sudo apt-get -qq install -y --no-install-recommends "${PACKAGES[@]}" >&2

say "fetching the kubernetes source"
(cd "$work" && apt-get "${src_apt[@]}" -qq update >&2 && apt-get "${src_apt[@]}" -qq source kubernetes >&2)
src=$(find "$work" -maxdepth 1 -type d -name 'kubernetes-*' | head -n 1)
[ -n "$src" ] || { say "apt-get source kubernetes left no folder"; exit 1; }

reflect2="$src/vendor/github.com/modern-go/reflect2"
rm -f "$reflect2"/*.go "$reflect2"/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go /usr/share/gocode/src/github.com/modern-go/reflect2/*.s "$reflect2/"
rm -f "$reflect2"/*_test.go

say "building ${BINARIES[*]} (minutes)"
mkdir -p "$src/.go/src/k8s.io"
ln -sfn "$src" "$src/.go/src/k8s.io/kubernetes"
(
    cd "$src/.go/src/k8s.io/kubernetes"
    export PATH="/usr/lib/go-1.19/bin:$PATH" GOPATH="$src/.go" GOCACHE="$work/gocache" CGO_ENABLED=0 GO111MODULE=off GOFLAGS=
    export KUBE_GIT_VERSION="$KUBE_VERSION" KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean
    KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 make WHAT="$(printf 'cmd/%s ' "${BINARIES[@]}")" >&2
)
mkdir -p "$work/assets"
for b in "${BINARIES[@]}"; do cp "$src/_output/local/bin/linux/$(/usr/lib/go-1.19/bin/go env GOARCH)/$b" "$work/assets/"; done
cp "$(command -v etcd)" "$work/assets/etcd"
rm -rf "$assets" && mv "$work/assets" "$assets"
complete "$assets" || { say "the build left no complete set in $assets"; exit 1; }
say "built $assets"
echo "$assets"
