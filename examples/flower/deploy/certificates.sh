#!/bin/sh
# Create keys and certificates for a federation with openssl (3.0 or later) and ssh-keygen:
#
#   ./certificates.sh FOLDER NODES HOST...      ./certificates.sh secrets 3 superlink.example.org 192.0.2.10
#
# HOST... are all names and addresses under which nodes reach the superlink. Where to copy the files:
#
#   ca.crt                  everywhere: nodes verify the superlink with it
#   server.pem, server.key  to the superlink
#   node-N                  only to the node of client N
#   node-N.pub              registered with the superlink: flwr supernode register node-N.pub
#   ca.key                  to a safe place: anyone who has it can impersonate the superlink
set -eu

if [ "$#" -lt 3 ]; then
    sed -n '4p' "$0" | cut -c3- >&2
    exit 2
fi
folder=$1 nodes=$2
shift 2
umask 077
mkdir -p "$folder"
cd "$folder"

names=""
for host in "$@"; do
    case $host in
        *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*) names="$names,IP:$host" ;;
        *) names="$names,DNS:$host" ;;
    esac
done

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 365 -sha384 \
    -subj "/CN=federation authority" -keyout ca.key -out ca.crt \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -sha384 \
    -subj "/CN=$1" -keyout server.key -out server.csr -addext "subjectAltName=${names#,}"
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -sha384 \
    -copy_extensions copy -out server.pem
rm -f server.csr ca.srl

node=0
while [ "$node" -lt "$nodes" ]; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "client $node" -f "node-$node"
    node=$((node + 1))
done
chmod 644 ca.crt server.pem node-*.pub
