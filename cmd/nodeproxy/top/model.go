package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"k8s.io/apimachinery/pkg/util/duration"

	"nodeproxy/inspect"
)

// Sample is what is known at one time.
type Sample struct {
	Traffic *inspect.Traffic
	Syncs   []inspect.Sync
	Err     error
}

// row is the traffic of a ServicePort, per second, and its connections in all. What is not counted is below zero.
type row struct {
	inspect.PortTraffic
	connections, packets, bytes float64
}

// ratesOf returns the rates between two readings; before the second, zero.
func ratesOf(before, now *inspect.Traffic) []row {
	known := map[inspect.PortTraffic]inspect.PortTraffic{}
	identity := func(p inspect.PortTraffic) inspect.PortTraffic {
		return inspect.PortTraffic{Namespace: p.Namespace, Name: p.Name, Port: p.Port, Protocol: p.Protocol, Family: p.Family}
	}
	seconds := 0.0
	if before != nil {
		for _, p := range before.Ports {
			known[identity(p)] = p
		}
		seconds = now.At.Sub(before.At).Seconds()
	}
	rate := func(then, now int64) float64 {
		switch {
		case now < 0:
			return -1
		case seconds <= 0:
			return 0
		case now < then: // It began at zero again.
			then = 0
		}
		return float64(now-then) / seconds
	}
	sum := func(in, out int64) int64 {
		if in < 0 {
			return out
		}
		return in + max(out, 0)
	}
	var rows []row
	for _, p := range now.Ports {
		then := known[identity(p)] // A new one's counters began at zero.
		rows = append(rows, row{
			p, rate(then.Connections, p.Connections),
			rate(sum(then.PacketsIn, then.PacketsOut), sum(p.PacketsIn, p.PacketsOut)), rate(sum(then.BytesIn, then.BytesOut), sum(p.BytesIn, p.BytesOut)),
		})
	}
	return rows
}

// orders are how rows can be sorted: the key to press, and what it means.
var orders = []struct {
	key, name string
	compare   func(a, b row) int
}{
	{"c", "connections", func(a, b row) int { return cmp.Compare(b.connections, a.connections) }},
	{"p", "packets", func(a, b row) int { return cmp.Compare(b.packets, a.packets) }},
	{"b", "bytes", func(a, b row) int { return cmp.Compare(b.bytes, a.bytes) }},
	{"t", "total", func(a, b row) int { return cmp.Compare(b.Connections, a.Connections) }},
	{"n", "name", func(row, row) int { return 0 }},
}

// view is what is shown of the samples.
type view struct {
	before, now   *inspect.Traffic
	syncs         []inspect.Sync
	err           error
	order         int // in orders
	filter        string
	namespace     string // "" for all
	width, height int
	first         int  // row shown
	onScreen      bool // whether headings stand out
}

// take takes a sample in.
func (v *view) take(s Sample) {
	if v.err = s.Err; s.Err == nil {
		v.before, v.now, v.syncs = v.now, s.Traffic, s.Syncs
	}
}

// rows returns the rows that the filter leaves, in order.
func (v *view) rows() []row {
	rows := slices.DeleteFunc(ratesOf(v.before, v.now), func(r row) bool {
		text := r.Namespace + "/" + r.Name + ":" + r.Port + "/" + string(r.Protocol) + " " + r.Family
		return v.namespace != "" && r.Namespace != v.namespace || !strings.Contains(strings.ToLower(text), strings.ToLower(v.filter))
	})
	slices.SortStableFunc(rows, orders[v.order].compare)
	return rows
}

// traffic returns a table of rows, without the columns that the mode does not count.
func (v *view) traffic(rows []row) string {
	header := "NAMESPACE NAME PORT FAMILY"
	type column struct {
		title string
		cell  func(row) float64
		show  func(float64) string
	}
	columns := []column{
		{"CONN/s", func(r row) float64 { return r.connections }, perSecond},
		{"PACKETS/s", func(r row) float64 { return r.packets }, perSecond},
		{"BYTES/s", func(r row) float64 { return r.bytes }, byteCount},
		{"CONNECTIONS", func(r row) float64 { return float64(r.Connections) }, func(n float64) string { return fmt.Sprintf("%.0f", n) }},
	}
	columns = slices.DeleteFunc(columns, func(c column) bool {
		return len(rows) > 0 && !slices.ContainsFunc(rows, func(r row) bool { return c.cell(r) >= 0 })
	})
	for _, c := range columns {
		header += " " + c.title
	}
	var cells [][]string
	for _, r := range rows {
		row := []string{r.Namespace, r.Name, strings.TrimPrefix(r.Port+"/", "/") + string(r.Protocol), r.Family}
		for _, c := range columns {
			text := ""
			if n := c.cell(r); n >= 0 {
				text = c.show(n)
			}
			row = append(row, text)
		}
		cells = append(cells, row)
	}
	return v.table(header, cells)
}

func (v *view) table(header string, rows [][]string) string {
	var b strings.Builder
	_ = inspect.Table(&b, header, rows) // A Builder takes everything.
	heading, rest, _ := strings.Cut(b.String(), "\n")
	return v.heading(heading) + "\n" + rest
}

// heading returns a line that stands out on a screen.
func (v *view) heading(line string) string {
	if v.onScreen {
		line = "\x1b[1m" + line + "\x1b[0m"
	}
	return line
}

func perSecond(n float64) string { return fmt.Sprintf("%.1f", n) }

func byteCount(n float64) string {
	for _, unit := range []string{"B", "KB", "MB"} {
		if n < 1000 {
			return fmt.Sprintf("%.1f%s", n, unit)
		}
		n /= 1000
	}
	return fmt.Sprintf("%.1fGB", n)
}

// costs is a table of what syncs cost.
func (v *view) costs() string {
	if len(v.syncs) == 0 {
		return ""
	}
	failed, total, changed := 0, 0.0, 0
	for i := range v.syncs {
		if v.syncs[i].Error != "" {
			failed++
		}
		if len(v.syncs[i].Services) > 0 {
			changed++
			total += v.syncs[i].Took.Total()
		}
	}
	last := v.syncs[len(v.syncs)-1]
	mean := ""
	if changed > 0 {
		mean = milliseconds(total / float64(changed))
	}
	var why []string
	for _, r := range last.Reasons {
		why = append(why, string(r))
	}
	when := last.Began
	if !last.Last.IsZero() {
		when = last.Last
	}
	return v.table("SYNCS FAILED WITH-CHANGES MEAN-OF-THESE LAST WHY TOOK ERROR", [][]string{{
		fmt.Sprint(last.Number), fmt.Sprint(failed), fmt.Sprint(changed), mean, duration.HumanDuration(v.now.At.Sub(when)), strings.Join(why, ","),
		milliseconds(last.Took.Total()), last.Error,
	}})
}

func milliseconds(seconds float64) string { return fmt.Sprintf("%.1fms", seconds*1000) }

// changes is a table of the latest changes, the newest first.
func (v *view) changes(most int) string {
	var rows [][]string
	for i := len(v.syncs) - 1; i >= 0 && len(rows) < most; i-- {
		s := v.syncs[i]
		for _, c := range s.Services {
			if len(rows) < most {
				rows = append(rows, []string{duration.HumanDuration(v.now.At.Sub(s.Began)), c.Namespace, c.Name, c.Change,
					fmt.Sprintf("+%d/-%d", c.EndpointsAdded, c.EndpointsRemoved)})
			}
		}
	}
	if len(rows) == 0 {
		return ""
	}
	return v.table("CHANGED NAMESPACE NAME CHANGE ENDPOINTS", rows)
}

// notCounted says why there is no traffic to show.
const notCounted = "Traffic is not counted: in mode iptables, run nodeproxy with --service-metrics=1000 or so; in other modes, not with --service-metrics=0."

// model is the live view, for bubbletea.
type model struct {
	view
	every    time.Duration
	sample   func() Sample
	typing   bool // the filter
	quitting bool
}

type tick struct{}

func (m model) ask() tea.Msg { return m.sample() }

// Init implements tea.Model.
func (m model) Init() tea.Cmd { return m.ask }

// Update implements tea.Model.
func (m model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tick:
		return m, m.ask
	case Sample:
		m.take(msg)
		return m, tea.Tick(m.every, func(time.Time) tea.Msg { return tick{} })
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		if msg.Keystroke() == "ctrl+c" || !m.typing && msg.Text == "q" {
			m.quitting = true
			return m, tea.Quit
		}
		m.key(msg)
	}
	return m, nil
}

// key does what a key means.
func (m *model) key(msg tea.KeyPressMsg) {
	page := max(1, m.room())
	switch msg.Code {
	case tea.KeyUp:
		m.first = max(0, m.first-1)
	case tea.KeyDown:
		m.first++
	case tea.KeyPgUp:
		m.first = max(0, m.first-page)
	case tea.KeyPgDown:
		m.first += page
	case tea.KeyHome:
		m.first = 0
	case tea.KeyEscape:
		m.typing, m.filter, m.first = false, "", 0
	case tea.KeyEnter:
		m.typing = false
	case tea.KeyBackspace:
		if m.typing && m.filter != "" {
			_, size := utf8.DecodeLastRuneInString(m.filter)
			m.filter, m.first = m.filter[:len(m.filter)-size], 0
		}
	default:
		switch {
		case m.typing:
			m.filter, m.first = m.filter+msg.Text, 0
		case msg.Text == "/":
			m.typing = true
		default:
			for i, o := range orders {
				if o.key == msg.Text {
					m.order, m.first = i, 0
				}
			}
		}
	}
}

// room is how many rows fit on the screen beside everything else.
func (m *model) room() int { return m.height - strings.Count(m.above(), "\n") - 3 }

// mostChanges is how many of the latest changes are shown.
const mostChanges = 3

// above is what is shown above the rows.
func (m *model) above() string {
	var b strings.Builder
	title := "nodeproxy top"
	if m.now != nil {
		title += fmt.Sprintf("   mode %s   %s   every %s   by %s", m.now.Mode, m.now.At.Local().Format(time.TimeOnly), m.every, orders[m.order].name)
	}
	switch {
	case m.typing:
		title += "   filter: " + m.filter + "_"
	case m.filter != "":
		title += "   filter: " + m.filter
	}
	b.WriteString(title + "\n\n")
	if m.err != nil {
		fmt.Fprintf(&b, "%s\n\n", strings.ReplaceAll(m.err.Error(), "\n", " "))
	}
	if m.now == nil {
		return b.String()
	}
	for _, part := range []string{m.costs(), m.changes(mostChanges)} {
		if part != "" {
			b.WriteString(part + "\n")
		}
	}
	return b.String()
}

// View implements tea.Model, on a screen of its own.
func (m model) View() tea.View {
	if m.quitting {
		return tea.NewView("")
	}
	view := tea.NewView(m.text())
	view.AltScreen = true
	return view
}

// text is what is on the screen.
func (m *model) text() string {
	m.onScreen = true
	text := m.above()
	switch {
	case m.now == nil:
	case !m.now.Counted:
		text += notCounted + "\n"
	default:
		rows := m.rows()
		first := min(m.first, max(0, len(rows)-1))
		text += m.traffic(rows[first:min(len(rows), first+max(1, m.room()))])
	}
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	for len(lines) < m.height-1 {
		lines = append(lines, "")
	}
	help := "q quit"
	for _, o := range orders {
		help += "   " + o.key + " " + o.name
	}
	lines = append(lines[:min(len(lines), max(1, m.height-1))], help+"   / filter   up, down")
	for _, i := range []int{0, len(lines) - 1} {
		lines[i] = m.heading(lines[i])
	}
	for i := range lines {
		if m.width > 0 {
			lines[i] = ansi.Truncate(lines[i], m.width, "")
		}
	}
	return strings.Join(lines, "\n")
}
