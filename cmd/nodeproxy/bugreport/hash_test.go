package bugreport

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"strings"
	"testing"
)

// TestHashNames: the same names and addresses become the same hashes in all files, everything around them stays, and another report has
// other hashes.
func TestHashNames(t *testing.T) {
	t.Parallel()
	files := func() []File {
		return []File{
			{"services.json", `[{"namespace": "shop", "name": "cart", "port": "http", "clusterIP": "10.96.0.10"}, {"namespace": "default", "name": "name"}]`},
			{"rules.txt", `-A KUBE-SERVICES -d 10.96.0.10/32 -m comment --comment "shop/cart:http cluster IP" -j KUBE-SVC-ABCDEFGHIJKLMN23` + "\n" +
				`-A KUBE-SVC-ABCDEFGHIJKLMN23 -s 127.0.0.1/32 -d fd00:10::a/128 -j DNAT --to-destination 10.244.1.5:8080` + "\n"},
			{"log.txt", `time=2026-11-22T21:24:37.123Z msg="Pod cart-7d9f-x on node n1.corp at [fd00:10::a]:443 asks https://api.corp.example:6443: EndpointSlice shop/cart-8xk"` + "\n" +
				`0.0.0.0:10256 ::: 10.244.1.5. cart.shop.svc at 21:24:37 dst:10.244.1.5 to IPv4:10.244.1.5:80, old/gone (gone) 10.244.1.5:dns 10.244.1.5:53:dns ` +
				`fieldSelector=metadata.name%3Dn1.corp&to=%2F10.244.1.5/16 KUBE-SVC-ABCDEFGHIJKLMN23` + "\n"},
		}
	}
	hash := func(key string) []File {
		a, out := newAnonymizer(), files()
		a.key = []byte(key) // With one drawn at random, the letters of a hash could be those of a name by chance.
		a.report(out)
		return out
	}
	report := hash("1")
	all := ""
	for _, f := range report {
		all += f.Text
	}
	for _, gone := range []string{"shop", "cart", "10.96.0.10", "10.244", "fd00", "corp", "ABCDEFGHIJKLMN23", "old/"} {
		if strings.Contains(all, gone) {
			t.Errorf("there is still %q", gone)
		}
	}
	for _, stays := range []string{`"name": "`, `"namespace": "default"`, `"port": "http"`, "KUBE-SERVICES -d ip4-", "/32 -m comment", ":http cluster IP", "127.0.0.1/32",
		"2026-11-22T21:24:37.123Z", "]:443 asks https://", ":6443: EndpointSlice", ":8080\n", "0.0.0.0:10256 ::: ", ".svc at 21:24:37 dst:ip4-", " to IPv4:ip4-"} {
		if !strings.Contains(all, stays) {
			t.Errorf("there is no %q", stays)
		}
	}
	cart := regexp.MustCompile(`"name": "(name-[a-z2-7]{12})", "port"`).FindStringSubmatch(report[0].Text)
	address := regexp.MustCompile(`"clusterIP": "(ip4-[a-z2-7]{12})"`).FindStringSubmatch(report[0].Text)
	chain := regexp.MustCompile(`-j (KUBE-SVC-[A-Z2-7]{16})\n-A (KUBE-SVC-[A-Z2-7]{16}) `).FindStringSubmatch(report[1].Text)
	if cart == nil || address == nil || chain == nil || chain[1] != chain[2] {
		t.Fatalf("%v %v %v in\n%s", cart, address, chain, all)
	}
	if !strings.Contains(report[1].Text, "/"+cart[1]+":http") || !strings.Contains(report[1].Text, "-d "+address[1]+"/32") || !strings.Contains(report[2].Text, cart[1]+".name-") {
		t.Errorf("%s and %s are not the same everywhere:\n%s", cart[1], address[1], all)
	}
	if !strings.Contains(report[2].Text, chain[1]) { // It stands behind what a URL has.
		t.Errorf("%s has another hash in\n%s", chain[1], report[2].Text)
	}
	again := hash("2")
	if strings.Contains(again[0].Text, cart[1]) || strings.Contains(again[0].Text, address[1]) {
		t.Error("another report has the same hashes")
	}
	if again := newAnonymizer(); again.address("2001:db8::1") != again.address(netip.MustParseAddr("2001:db8:0::1").String()) {
		t.Error("two forms of an address have different hashes")
	}
	if a, b := newAnonymizer(), newAnonymizer(); string(a.key) == string(b.key) {
		t.Error("two reports have the same key")
	}
}

// TestHashNamesOnlyNames: names may be numbers, or words that are also keys, values and parts of addresses. JSON stays JSON, all its keys and
// numbers stay, and what the system says of itself teaches no names.
func TestHashNamesOnlyNames(t *testing.T) {
	t.Parallel()
	const services = `[{"namespace": "1", "name": "80", "port": "http", "number": 80, "clusterIP": "fd00:10:1::80", "name2": {"1": 1}},
		{"namespace": "shop", "name": "true", "ready": true, "10.96.0.10": "1"}, {"namespace": "db8", "name": "name", "at": "2026-11-22T01:10:80Z"}]`
	const system = "== /proc/loadavg\n0.00 0.01 0.05 1/465 123456\n== /proc/version\nLinux version 6.18.80 (a/b)\n"
	const rules = `-A KUBE-POSTROUTING -s fd00:10:1::/64 -d 2001:db8:1::/48 -m mark ! --mark 0x4000/0x4000 -j RETURN` + "\n" +
		`-A KUBE-SERVICES -d fd00:10:1::80/128 -m comment --comment "1/80:http cluster IP" -m tcp --dport 80 -j X` + "\n"
	report := []File{{"version.txt", "v1.80.1\n"}, {"services.json", services}, {"system.txt", system}, {"rules.txt", rules}}
	HashNames(report)
	if report[0].Text != "v1.80.1\n" || report[2].Text != system {
		t.Errorf("version and system are\n%s%s", report[0].Text, report[2].Text)
	}
	for _, gone := range []string{"fd00", "2001:", "db8", "1/80"} {
		if strings.Contains(report[1].Text+report[3].Text, gone) {
			t.Errorf("there is still %q", gone)
		}
	}
	if want := regexp.MustCompile(`^-A KUBE-POSTROUTING -s ip6-\w{12}/64 -d ip6-\w{12}/48 -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-SERVICES -d ip6-\w{12}/128 -m comment --comment "name-\w{12}/name-\w{12}:http cluster IP" -m tcp --dport 80 -j X
$`); !want.MatchString(report[3].Text) {
		t.Errorf("rules are\n%s", report[3].Text)
	}
	want := regexp.MustCompile(`^\[\{"namespace": "name-\w{12}", "name": "name-\w{12}", "port": "http", "number": 80, "clusterIP": "ip6-\w{12}", "name2": \{"1": 1\}\},
		\{"namespace": "name-\w{12}", "name": "name-\w{12}", "ready": true, "ip4-\w{12}": "1"\}, \{"namespace": "name-\w{12}", "name": "name-\w{12}", "at": "2026-11-22T01:10:80Z"\}\]$`)
	if !want.MatchString(report[1].Text) || !json.Valid([]byte(report[1].Text)) {
		t.Errorf("Services are\n%s", report[1].Text)
	}
}

// TestHashNamesOfLog: what the log may list as objects is hashed there, and teaches no names that would spoil rules; files of manifests stay.
func TestHashNamesOfLog(t *testing.T) {
	t.Parallel()
	const log = `msg="more syncs within a second changed shop/cart, endpoints +0/-1" at=m/a.yaml:20 object="Service shop/cart"` + "\n" +
		`msg="a health check node port stopped listening" service=gone/cart port=31000` + "\n" + `msg="m/a.yaml:20: apiVersion (apps/v1) for tcp/udp is not used"` + "\n"
	const rules = "-A KUBE-X -p tcp -m tcp -m mark --mark 0x4000 -j RETURN\n"
	report := []File{{"version.txt", "v1.2.3\n"}, {"log.txt", log}, {"rules.txt", rules}}
	HashNames(report)
	if report[0].Text != "v1.2.3\n" || report[2].Text != rules {
		t.Errorf("version and rules are\n%s%s", report[0].Text, report[2].Text)
	}
	if text := report[1].Text; strings.Contains(text, "shop") || strings.Contains(text, "cart") || strings.Contains(text, "gone") || !strings.Contains(text, " at=m/a.yaml:20 ") || !strings.Contains(text, `"m/a.yaml:20: `) {
		t.Errorf("the log is\n%s", text)
	}
}

// TestSecrets: what looks like a token, a key or a certificate is left out, and nothing else.
func TestSecrets(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"Authorization: Bearer abc.def-9=; x":                                     "Authorization: REDACTED; x",
		"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\nand":       "REDACTED\nand",
		"eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.eyJpc3MiOiJr.c2ln at":                   "REDACTED at",
		"-----BEGIN RSA PRIVATE KEY-----\nMIIB/hu+sh":                             "REDACTED",
		`-----BEGIN CERTIFICATE-----\nMIIB" at 12:00`:                             `REDACTED" at 12:00`,
		`"Authorization":["Basic aHVzaDpodXNo"]`:                                  `"REDACTED"]`,
		`client-key-data: aHVzaA==`:                                               `client-key-data: REDACTED`,
		`password = hush, passwd: hush api_key=hush`:                              `password = REDACTED, passwd: REDACTED api_key=REDACTED`,
		`AWS_SECRET_ACCESS_KEY="hu sh"`:                                           `AWS_SECRET_ACCESS_KEY="REDACTED"`,
		`https://hush@host/a?b https://me:hu/sh@host`:                             `https://REDACTED@host/a?b https://REDACTED@host`,
		`Service shop/api-key:http, key-data of shop/web`:                         `Service shop/api-key:http, key-data of shop/web`,
		`{"token": "hush", "a": 1}`:                                               `{"token": "REDACTED", "a": 1}`,
		`{"clientSecret":"a \"b\" c","name":"vault-token","port":"http"}`:         `{"clientSecret":"REDACTED","name":"vault-token","port":"http"}`,
		`--comment "shop/vault-token:http cluster IP"`:                            `--comment "shop/vault-token:http cluster IP"`,
		`Service shop/my-secret: spec.clusterIP: "x" is not an IP address`:        `Service shop/my-secret: spec.clusterIP: "x" is not an IP address`,
		`level=INFO service=shop/vault-token:http token=hush next=1`:              `level=INFO service=shop/vault-token:http token=REDACTED next=1`,
		`example.com/api-token: hush`:                                             `example.com/api-token: REDACTED`,
		`"msg":"{\"password\":\"hu sh\",\"a\":1}"`:                                `"msg":"{\"password\":\"REDACTED\",\"a\":1}"`,
		`password='hu sh' --token=hush;`:                                          `password='REDACTED' --token=REDACTED;`,
		`get "https://me:hush@10.0.0.1:6443/api": x`:                              `get "https://REDACTED@10.0.0.1:6443/api": x`,
		`x{service="db-password",port="sql"} 1`:                                   `x{service="db-password",port="sql"} 1`,
		"-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-EYJ (kube-system/token-x)": "-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-EYJ (kube-system/token-x)",
	} {
		if got := Redact(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
