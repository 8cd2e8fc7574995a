package ipset

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/module"
	"nodeproxy/kernel/netlink"
)

// Sets are the ipsets of a network namespace.
type Sets struct {
	mu    sync.Mutex
	conn  *netlink.Conn
	alone bool // When Sizes looked last, there were no sets but those that it was asked for.
}

// OpenSets loads the kernel modules of ipset if necessary and possible. The error names those that are missing.
func OpenSets() (*Sets, error) {
	s, err := Present()
	if err != nil {
		return nil, err
	}
	for _, kind := range slices.Sorted(maps.Keys(setTypes)) {
		if err := s.hasType(kind); err != nil {
			_ = s.Close()
			return nil, err
		}
	}
	return s, nil
}

// Present returns the sets that there are, of whatever type, by a socket of its own, so that reading does not hold up who uses others. It loads
// no module, and must be closed.
func Present() (*Sets, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("ipset: %w", err)
	}
	return &Sets{conn: c}, nil
}

// Close closes the socket. It changes nothing.
func (s *Sets) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn.Close()
}

// hasType returns an error if the kernel lacks a type of set, or the revision that is used.
func (s *Sets) hasType(kind string) error {
	ask := func() ([]byte, error) {
		body, err := s.conn.Ask(setMessage(ipsetType, 0, "", func(b netlink.Buffer) netlink.Buffer {
			return b.Text(setAttrType, kind).Bytes(setAttrFamily, unix.AF_INET)
		}))
		return body, explain(err)
	}
	body, err := ask()
	switch {
	case err == nil:
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("ipset: the capability CAP_NET_ADMIN is missing: run as root, or add it: %w", err)
	default:
		missing := "ip_set"
		if isSetError(err, ipsetNoSuchType) {
			missing = "ip_set_" + kind // an alias of the module
		}
		if load := errors.Join(module.Load("ip_set"), module.Load("ip_set_"+kind)); load == nil {
			body, err = ask()
		}
		if err != nil {
			return fmt.Errorf("ipset: this kernel has no sets of type %s, and the module %s cannot be loaded: run modprobe %s"+
				" on this node, or use another proxy mode: %w", kind, missing, missing, err)
		}
	}
	var newest, oldest uint8
	for kind, value := range netlink.Attributes(behindHeader(body)) {
		switch kind {
		case setAttrRevision:
			newest = uint8(netlink.Number(value))
		case setAttrMinRevision:
			oldest = uint8(netlink.Number(value))
		}
	}
	if want := setTypes[kind].revision; want < oldest || want > newest {
		return fmt.Errorf("ipset: this kernel has revisions %d to %d of sets of type %s, and revision %d is needed (Linux 3.18):"+
			" use a newer kernel, or another proxy mode", oldest, newest, kind, want)
	}
	return nil
}

func isSetError(err error, number int32) bool {
	var e setError
	return errors.As(err, &e) && e.number == number
}

// Names returns the names of all sets, in order.
func (s *Sets) Names() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names()
}

func (s *Sets) names() ([]string, error) {
	var names []string
	err := s.dump(listMessage("", flagListNames), func() { names = nil }, func(body []byte) error {
		if name := netlink.Attribute(behindHeader(body), setAttrName); name != nil {
			names = append(names, netlink.Text(name))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing ipsets: %w", err)
	}
	slices.Sort(names)
	return names, nil
}

// Ensure makes a set unless it exists. One with other properties is replaced by an empty one, which rules use from then on. That
// requires an equal type and family, unless no rule uses the set.
func (s *Sets) Ensure(want Set) (created bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := setTypes[want.Type]; !ok {
		return false, fmt.Errorf("ipset %s: the type %q is not one that this program knows", want.Name, want.Type)
	}
	actual, err := s.header(want.Name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return true, s.create(want)
	case err != nil:
		return false, fmt.Errorf("reading ipset %s: %w", want.Name, err)
	case actual.is(want):
		return false, nil
	}
	err = s.replace(want, nil)
	if isSetError(err, ipsetTypeMismatch) {
		// What no rule uses can go first.
		if err = s.destroy(want.Name); err != nil {
			return false, fmt.Errorf("ipset %s is of type %s and not %s, and cannot be replaced: remove the rules that use it: %w",
				want.Name, actual.kind, want.Type, err)
		}
		return true, s.create(want)
	}
	if err != nil {
		return false, fmt.Errorf("replacing ipset %s, which has other properties: %w", want.Name, err)
	}
	return true, nil
}

// replace puts a new set with some entries in the place of one, unnoticed by rules. A leftover of an earlier attempt is removed first.
func (s *Sets) replace(set Set, entries []Entry) error {
	next := set
	next.Name = set.Name[:min(len(set.Name), 27)] + "-new"
	if err := s.destroy(next.Name); err != nil {
		return err
	}
	if err := s.create(next); err != nil {
		return err
	}
	var err error
	for some := range slices.Chunk(entries, entriesAtOnce) {
		if err = s.send(ipsetAdd, next, some); err != nil {
			break
		}
	}
	if err == nil {
		err = whileRead(func() error { return s.swap(set.Name, next.Name) })
	}
	return errors.Join(err, whileRead(func() error { return s.destroy(next.Name) }))
}

func (s *Sets) do(m netlink.Message) error { return explain(errors.Join(s.conn.Do(m)...)) }

// dump retries what changes meanwhile; begin is called before each try.
func (s *Sets) dump(m netlink.Message, begin func(), each func(body []byte) error) error {
	return explain(netlink.Retry(func() error {
		begin()
		return s.conn.Dump(m, each)
	}))
}

func (s *Sets) create(set Set) error {
	create := setMessage(ipsetCreate, unix.NLM_F_CREATE|unix.NLM_F_EXCL, set.Name, func(b netlink.Buffer) netlink.Buffer {
		return appendCreate(b, set)
	})
	if err := s.do(create); err != nil {
		return fmt.Errorf("making ipset %s of type %s: %w", set.Name, set.Type, err)
	}
	return nil
}

// swap exchanges the content of two sets.
func (s *Sets) swap(a, b string) error {
	swap := setMessage(ipsetSwap, 0, a, func(body netlink.Buffer) netlink.Buffer { return body.Text(setAttrOtherName, b) })
	return s.do(swap)
}

// Destroy removes a set.
func (s *Sets) Destroy(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.destroy(name)
}

func (s *Sets) destroy(name string) error {
	err := s.do(setMessage(ipsetDestroy, 0, name, nil))
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case isSetError(err, ipsetBusy):
		return fmt.Errorf("ipset %s cannot be removed, since rules (of iptables, say) still use it: %w", name, err)
	default:
		return fmt.Errorf("removing ipset %s: %w", name, err)
	}
}

// header reads what a set is like.
func (s *Sets) header(name string) (actualSet, error) {
	var h actualSet
	err := s.dump(listMessage(name, flagListHeader), func() {}, func(body []byte) error {
		h = parseSet(body)
		return nil
	})
	return h, err
}

// Sizes returns the number of entries of each of some sets that is there, by its name. It asks for all at once, unless these are few, or there
// are others: the kernel walks all entries of a set to say how many there are, with softirqs disabled, and other programs' sets may be large.
func (s *Sets) Sizes(names []string) (map[string]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sizes, err := s.sizes(names)
	if err != nil {
		return nil, fmt.Errorf("reading the sizes of ipsets: %w", err)
	}
	return sizes, nil
}

// FewSets is how many sets Sizes asks for one after the other, which takes three system calls for each. All at once, it is one for each set that
// there is.
const FewSets = 8

func (s *Sets) sizes(names []string) (map[string]int, error) {
	if len(names) <= FewSets {
		return s.sizesOf(names)
	}
	other := func(name string) bool { return !slices.Contains(names, name) }
	if !s.alone {
		there, err := s.names()
		if err != nil {
			return nil, err
		}
		if s.alone = !slices.ContainsFunc(there, other); !s.alone {
			return s.sizesOf(slices.DeleteFunc(there, other))
		}
	}
	sizes := map[string]int{}
	err := s.dump(listMessage("", flagListHeader), func() { clear(sizes) }, func(body []byte) error {
		if name := netlink.Attribute(behindHeader(body), setAttrName); name != nil {
			sizes[netlink.Text(name)] = int(parseSet(body).elements)
		}
		return nil
	})
	there := len(sizes)
	maps.DeleteFunc(sizes, func(name string, _ int) bool { return other(name) })
	s.alone = err == nil && len(sizes) == there
	return sizes, err
}

// sizesOf asks for one set after the other.
func (s *Sets) sizesOf(names []string) (map[string]int, error) {
	sizes := map[string]int{}
	for _, name := range names {
		switch h, err := s.header(name); {
		case err == nil:
			sizes[name] = int(h.elements)
		case !errors.Is(err, unix.ENOENT): // It may have been removed meanwhile.
			return nil, err
		}
	}
	return sizes, nil
}

// Entries calls each with all entries of a set; it must not use s. If the set changes meanwhile, it is read again: begin is called before the
// first entry, each time.
func (s *Sets) Entries(set Set, begin func(), each func(Entry)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries(set, begin, each)
}

func (s *Sets) entries(set Set, begin func(), each func(Entry)) error {
	err := s.dump(setMessage(ipsetList, 0, set.Name, nil), begin, func(body []byte) error {
		for _, data := range netlink.Attributes(netlink.Attribute(behindHeader(body), setAttrEntries)) {
			e, err := parseEntry(data, set)
			if err != nil {
				return err
			}
			each(e)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading ipset %s: %w", set.Name, err)
	}
	return nil
}

// EntryError is an entry of a set that the kernel refuses.
type EntryError struct {
	Set   Set
	Entry Entry
	Err   error
}

func (e *EntryError) Error() string {
	return fmt.Sprintf("ipset %s, entry %s: %v", e.Set.Name, e.Entry.Text(e.Set), e.Err)
}

func (e *EntryError) Unwrap() error { return e.Err }

// Add adds entries, or changes their marks. A full set is replaced by a larger one, unnoticed by rules. The error joins an
// EntryError for each entry that the kernel refuses; if it has no other error, all other entries are added.
func (s *Sets) Add(set Set, entries []Entry) error { return s.change(ipsetAdd, set, entries) }

// Remove removes entries; their marks do not matter.
func (s *Sets) Remove(set Set, entries []Entry) error { return s.change(ipsetDelete, set, entries) }

// entriesAtOnce is how many entries are sent in a message. The largest takes 92 bytes, and an attribute 65,535.
const entriesAtOnce = 500

func (s *Sets) change(command uint16, set Set, entries []Entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var failed []error
	for len(entries) > 0 {
		some := entries[:min(len(entries), entriesAtOnce)]
		err := s.send(command, set, some)
		var e setError
		switch known := errors.As(err, &e) && e.entry > 0 && e.entry <= len(some); {
		case err == nil:
			entries = entries[len(some):]
		case isSetError(err, ipsetFull) && command == ipsetAdd:
			if err := s.grow(set); err != nil {
				return errors.Join(append(failed, err)...)
			}
			if known {
				entries = entries[e.entry-1:]
			}
		case known:
			failed = append(failed, &EntryError{Set: set, Entry: some[e.entry-1], Err: err})
			entries = entries[e.entry:]
		default:
			failed = append(failed, fmt.Errorf("ipset %s, %d entries from %s on: %w", set.Name, len(entries), some[0].Text(set), err))
			return errors.Join(failed...)
		}
	}
	return errors.Join(failed...)
}

// send adds or removes some entries. After an error, those before the refused one are done.
func (s *Sets) send(command uint16, set Set, entries []Entry) error {
	request := setMessage(command, 0, set.Name, func(b netlink.Buffer) netlink.Buffer {
		b = b.Uint32(setAttrLine, 0)
		return b.Nest(setAttrEntries, func(b netlink.Buffer) netlink.Buffer {
			for i, e := range entries {
				b = appendEntry(b, set, e, i+1)
			}
			return b
		})
	})
	return s.do(request)
}

// grow replaces a set by one for four times as many entries, with the same ones in it.
func (s *Sets) grow(set Set) error {
	fail := func(err error) error {
		return fmt.Errorf("ipset %s is full, and making a larger one failed: %w", set.Name, err)
	}
	actual, err := s.header(set.Name)
	if err != nil {
		return fail(err)
	}
	const most = 1 << 30
	if actual.maxElem >= most || actual.maxElem == 0 {
		return fail(fmt.Errorf("it has %d entries", actual.elements))
	}
	var entries []Entry
	if err := s.entries(set, func() { entries = nil }, func(e Entry) { entries = append(entries, e) }); err != nil {
		return fail(err)
	}
	larger := set
	larger.MaxElem = min(4*actual.maxElem, most)
	if err := s.replace(larger, entries); err != nil {
		return fail(err)
	}
	return nil
}

// Reading a set of 65,536 entries takes some 30 ms.
const (
	readTry     = 2 * time.Millisecond
	longestRead = time.Second
)

// whileRead repeats what the kernel refuses while somebody reads the set, this program among them.
func whileRead(do func() error) error {
	begin := time.Now()
	for {
		err := do()
		busy := errors.Is(err, unix.EBUSY) || isSetError(err, ipsetBusy)
		if !busy || time.Since(begin) > longestRead {
			return err
		}
		time.Sleep(readTry)
	}
}
