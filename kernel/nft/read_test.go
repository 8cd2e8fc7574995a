package nft

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// TestFind: of many keys in two sets, each that is there is found, in order, whatever others are missing; and it ends with the caller's error.
func TestFind(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "nft", "add table ip t; add set ip t a { type mark; }; add set ip t b { type mark; }")
	c, err := Dial()
	require.NoError(t, err)
	defer c.Close()
	random := rand.New(rand.NewPCG(1, 2))
	var keys []ElementKey
	var there []bool
	b := NewBatch(plan.IPv4, "t")
	for i := range 3000 {
		name, is := "a", true
		if i%1000 > 700 {
			name = "b"
		}
		switch { // Runs of those that are there, of those that are not, and both at random.
		case i > 2000:
			is = random.IntN(20) > 0
		case i > 1800:
			is = false
		}
		key := string(binary.NativeEndian.AppendUint32(nil, uint32(i)))
		if keys, there = append(keys, ElementKey{name, key}), append(there, is); is {
			b.AddElements(Set{Name: name}, []Element{{Key: key}})
		}
	}
	keys, there = append(keys, ElementKey{"none", keys[0].Key}), append(there, false)
	require.NoError(t, c.Commit(b))
	next := 0
	if err := c.Find(plan.IPv4, "t", keys, func(i int, e Element, is bool) error {
		if i != next || is != there[i] || is && e.Key != keys[i].Key {
			t.Errorf("key %d of set %s: %d %q %v, want %v", next, keys[next].Set, i, e.Key, is, there[next])
		}
		next++
		return nil
	}); err != nil || next != len(keys) {
		t.Errorf("%d of %d keys were looked for: %v", next, len(keys), err)
	}
	enough := errors.New("enough")
	for last := range 130 {
		if err := c.Find(plan.IPv4, "t", keys[1900:], func(i int, _ Element, _ bool) error {
			if i == last {
				return enough
			}
			return nil
		}); err != enough {
			t.Fatalf("after %d keys: %v", last+1, err)
		}
	}
}

// TestGeneration: it changes with anything, and with nothing else.
func TestGeneration(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	c, err := Dial()
	require.NoError(t, err)
	defer c.Close()
	generation := func() uint32 {
		n, err := c.Generation()
		require.NoError(t, err)
		return n
	}
	first := generation()
	require.Equal(t, first, generation())
	b := NewBatch(plan.IPv6, "t")
	b.AddTable()
	require.NoError(t, c.Commit(b))
	require.NotEqual(t, first, generation())
}

// TestDigests: a digest changes with the rules of its chain, whatever they are and in which order, and with nothing else.
func TestDigests(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	do := func(command string) { nstest.Exec(t, "nft", command) }
	do("add table ip t; add chain ip t c { type filter hook output priority 0; }; add chain ip t other; add chain ip t none")
	digests := func() []uint64 {
		list, err := Digests(plan.IPv4, "t", []string{"c", "other", "none", "absent"})
		require.NoError(t, err)
		return list
	}
	do("add rule ip t c counter accept; add rule ip t other tcp dport 80 counter; add rule ip t other tcp dport 81 counter")
	before := digests()
	require.Equal(t, before, digests())
	require.NotEqual(t, before[0], before[1])
	require.NotEqual(t, before[1], before[2])
	require.Equal(t, before[2], before[3])

	conn, err := net.Dial("udp4", "127.0.0.1:9")
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("counted"))
	require.NoError(t, err)
	out, err := exec.Command("nft", "list chain ip t c").Output()
	require.NoError(t, err)
	require.NotContains(t, string(out), "packets 0", "the packet is counted")
	require.Equal(t, before, digests(), "what rules count does not matter")

	for _, change := range []string{
		"add rule ip t other tcp dport 82 counter", "insert rule ip t other accept", "replace rule ip t other handle HANDLE tcp dport 79 counter",
		"flush chain ip t other; add rule ip t other tcp dport 80 counter; add rule ip t other tcp dport 81 counter",
		"flush chain ip t other",
	} {
		handles, err := Rules(plan.IPv4, "t", "other", func(attrs []byte) uint64 {
			return netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_RULE_HANDLE))
		})
		require.NoError(t, err)
		before := digests()
		do(strings.ReplaceAll(change, "HANDLE", strconv.FormatUint(handles[0], 10)))
		now := digests()
		require.NotEqual(t, before[1], now[1], change)
		require.Equal(t, before[0], now[0], change)
	}
}
