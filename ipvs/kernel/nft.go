package kernel

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// ErrNoGuard is the error for a kernel without nftables.
var ErrNoGuard = errors.New("this kernel has no nftables (module nf_tables)")

// nftRule is one rule: its statements, and what it looks like in the language of nft.
type nftRule struct {
	text  string
	exprs []expr.Any
}

// nftChain is a chain at a hook, which ends with acceptance.
type nftChain struct {
	name, hook string
	priority   int32
	rules      []nftRule
	// reroutes is set where the kernel finds another route for packets whose mark the chain has changed.
	reroutes bool
}

func (c nftChain) kind() nftables.ChainType {
	if c.reroutes {
		return nftables.ChainTypeRoute
	}
	return nftables.ChainTypeFilter
}

var nftHooks = map[string]*nftables.ChainHook{
	"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput, "forward": nftables.ChainHookForward,
	"output": nftables.ChainHookOutput,
}

var nftFamilies = map[plan.Family]struct {
	family nftables.TableFamily
	name   string
}{plan.IPv4: {nftables.TableFamilyIPv4, "ip"}, plan.IPv6: {nftables.TableFamilyIPv6, "ip6"}}

// tableText is a table in the language of nft.
func tableText(f plan.Family, name string, chains []nftChain) string {
	out := fmt.Sprintf("table %s %s\n", nftFamilies[f].name, name)
	for _, c := range chains {
		out += fmt.Sprintf("chain %s type %s hook %s priority %d\n", c.name, c.kind(), c.hook, c.priority)
		for _, r := range c.rules {
			out += "rule " + c.name + " " + r.text + "\n"
		}
	}
	return out
}

// nftTable is a table of this program's in the network namespace of the thread that opened it.
type nftTable struct {
	conn  *nftables.Conn
	table *nftables.Table
}

// openTable returns ErrNoGuard where the kernel has no nftables. It makes no table.
func openTable(f plan.Family, name string) (*nftTable, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("nftables: netlink socket: %w", err)
	}
	t := &nftTable{conn, &nftables.Table{Family: nftFamilies[f].family, Name: name}}
	if _, err := conn.ListTablesOfFamily(t.table.Family); err != nil {
		_ = t.Close()
		return nil, noNFTables(err)
	}
	return t, nil
}

// noNFTables is ErrNoGuard for what a kernel without nftables answers.
func noNFTables(err error) error {
	for _, absent := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
		if errors.Is(err, absent) {
			return ErrNoGuard
		}
	}
	return fmt.Errorf("nftables: %w", err)
}

// Close closes the socket. The table stays.
func (t *nftTable) Close() error { return t.conn.CloseLasting() }

// label is what each rule carries, so that it is told from others by it.
func (c nftChain) label(i int) []byte {
	sum := sha256.Sum256([]byte(fmt.Sprintf("%s %s %d %s", c.name, c.hook, c.priority, c.rules[i].text)))
	return fmt.Appendf(nil, "nodeproxy %x", sum[:8])
}

func (c nftChain) labels() [][]byte {
	var out [][]byte
	for i := range c.rules {
		out = append(out, c.label(i))
	}
	return out
}

// holds reports whether the table has chains, and whether they are these.
func (t *nftTable) holds(want []nftChain) (exists, same bool, err error) {
	have, err := t.labels()
	if err != nil {
		return false, false, fmt.Errorf("reading nftables table %s: %w", t.table.Name, err)
	}
	same = len(have) == len(want)
	for _, c := range want {
		same = same && have[c.name] != nil && slices.EqualFunc(have[c.name], c.labels(), slices.Equal[[]byte])
	}
	return len(have) > 0, same, nil
}

// labels are those of the rules that there are, by chain.
func (t *nftTable) labels() (map[string][][]byte, error) {
	all, err := t.conn.ListChainsOfTableFamily(t.table.Family)
	if err != nil {
		return nil, err
	}
	out := map[string][][]byte{}
	for _, c := range all {
		if c.Table.Name != t.table.Name {
			continue
		}
		rules, err := t.conn.GetRules(t.table, c)
		if err != nil {
			return nil, err
		}
		out[c.Name] = [][]byte{}
		for _, r := range rules {
			out[c.Name] = append(out[c.Name], r.UserData)
		}
	}
	return out, nil
}

// replace has the next flush put an empty table in place of the table.
func (t *nftTable) replace() {
	t.conn.AddTable(t.table)
	t.conn.DelTable(t.table)
	t.conn.AddTable(t.table)
}

// add has the next flush add chains.
func (t *nftTable) add(chains []nftChain) {
	accept := nftables.ChainPolicyAccept
	for _, c := range chains {
		chain := t.conn.AddChain(&nftables.Chain{
			Name: c.name, Table: t.table, Type: c.kind(), Hooknum: nftHooks[c.hook],
			Priority: nftables.ChainPriorityRef(nftables.ChainPriority(c.priority)), Policy: &accept,
		})
		for i, r := range c.rules {
			t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: chain, Exprs: r.exprs, UserData: c.label(i)})
		}
	}
}

// flush does what has been prepared, all or nothing of it.
func (t *nftTable) flush() error {
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("writing nftables table %s: %w", t.table.Name, err)
	}
	return nil
}

// familiesWithTable lists the families that have a table of a name in the network namespace of the calling thread.
func familiesWithTable(name string) ([]plan.Family, error) {
	var out []plan.Family
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: netlink socket: %w", err)
	}
	for _, f := range plan.Families {
		list, err := conn.ListTablesOfFamily(nftFamilies[f].family)
		if err != nil {
			if err = noNFTables(err); errors.Is(err, ErrNoGuard) {
				continue
			}
			return nil, err
		}
		if slices.ContainsFunc(list, func(t *nftables.Table) bool { return t.Name == name }) {
			out = append(out, f)
		}
	}
	return out, nil
}

// removeTables removes the tables of a name, if there are any.
func removeTables(name string) error {
	families, err := familiesWithTable(name)
	if err != nil || len(families) == 0 {
		return err
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: netlink socket: %w", err)
	}
	for _, f := range families {
		conn.DelTable(&nftables.Table{Family: nftFamilies[f].family, Name: name})
	}
	if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing nftables table %s: %w", name, err)
	}
	return nil
}
