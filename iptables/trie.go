package iptables

import "strings"

// key is what a dispatcher recognises a packet by, as a string of 4-bit digits, one a byte: the destination address, the
// protocol, the destination port. All keys of one dispatcher are equally long.
type key string

// A trie is an immutable tree of entries by key; nil is the empty one. Changing it makes a new one that shares all but one
// path with the old, so that two of them are compared at the cost of what differs. Its shape, and so that of the chains
// made from it, depends on the set of keys alone, not on the order in which they came.
type trie struct {
	prefix key     // what all keys below have in common; the whole key in an entry
	from   origin  // of an entry
	kids   []*trie // at least two, in order of the digit behind prefix; none in an entry
	count  int32   // entries below
	// levels is how many chains deep the trie is if each inner trie becomes a chain of its own (dispatch.go).
	levels int32
}

func (t *trie) isEntry() bool { return len(t.kids) == 0 }

// with returns the trie with an entry at k, in place of the one there was.
func (t *trie) with(k key, from origin) *trie {
	entry := &trie{prefix: k, from: from, count: 1, levels: 1}
	if t == nil {
		return entry
	}
	n := commonPrefix(t.prefix, k)
	if n < len(t.prefix) {
		kids := []*trie{t, entry}
		if k[n] < t.prefix[n] {
			kids = []*trie{entry, t}
		}
		return parent(k[:n], kids)
	}
	if t.isEntry() {
		return entry
	}
	i, found := t.kid(k)
	if !found {
		kids := make([]*trie, 0, len(t.kids)+1)
		kids = append(append(append(kids, t.kids[:i]...), entry), t.kids[i:]...)
		return t.withKids(kids)
	}
	kids := append([]*trie(nil), t.kids...)
	kids[i] = kids[i].with(k, from)
	return t.withKids(kids)
}

// without returns the trie without the entry at k.
func (t *trie) without(k key) *trie {
	if t == nil || !strings.HasPrefix(string(k), string(t.prefix)) {
		return t
	}
	if t.isEntry() {
		return nil
	}
	i, found := t.kid(k)
	if !found {
		return t
	}
	kid := t.kids[i].without(k)
	if kid == t.kids[i] {
		return t
	}
	if kid == nil {
		if len(t.kids) == 2 {
			return t.kids[1-i]
		}
		kids := make([]*trie, 0, len(t.kids)-1)
		return t.withKids(append(append(kids, t.kids[:i]...), t.kids[i+1:]...))
	}
	kids := append([]*trie(nil), t.kids...)
	kids[i] = kid
	return t.withKids(kids)
}

// at returns the origin of the entry at k; nil if there is none.
func (t *trie) at(k key) origin {
	for t != nil && strings.HasPrefix(string(k), string(t.prefix)) {
		if t.isEntry() {
			return t.from
		}
		i, found := t.kid(k)
		if !found {
			return nil
		}
		t = t.kids[i]
	}
	return nil
}

// kid finds the child for a key that has t's prefix, or where one would have to be put.
func (t *trie) kid(k key) (int, bool) {
	digit := k[len(t.prefix)]
	for i, kid := range t.kids {
		if d := kid.prefix[len(t.prefix)]; d >= digit {
			return i, d == digit
		}
	}
	return len(t.kids), false
}

func (t *trie) withKids(kids []*trie) *trie { return parent(t.prefix, kids) }

// parent joins tries that have a prefix in common and differ in the digit behind it.
func parent(prefix key, kids []*trie) *trie {
	t := &trie{prefix: prefix, kids: kids, levels: 1}
	for _, kid := range kids {
		t.count += kid.count
	}
	if !inner(t) {
		return t
	}
	for _, kid := range kids {
		if !kid.isEntry() {
			t.levels = max(t.levels, 1+kid.levels)
		}
	}
	return t
}

// entries calls visit for all entries in order of key.
func (t *trie) entries(visit func(*trie)) {
	switch {
	case t == nil:
	case t.isEntry():
		visit(t)
	default:
		for _, kid := range t.kids {
			kid.entries(visit)
		}
	}
}

func commonPrefix(a, b key) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
