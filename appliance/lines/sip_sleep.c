/* When the threads of baresip's that carry a call's audio wake up.
 *
 * Each call has three: one takes what came, one feeds the sender, each every 20 ms; the sender
 * looks every 4 ms whether its packet is due. Each sleeps for itself, so with a hundred calls a
 * processor is interrupted 35,000 times a second, and whatever else it does is stopped as often.
 * And when a call ends, the one thread that receives for all calls waits until each of the three
 * has slept to the end: 30 ms in which nobody is heard.
 *
 * Here they sleep until the next point of a grid that all of them share, of 10 ms: every packet
 * time in use is a multiple of it. So many of them wake at once, one after the other, and a
 * sender does so 100 times a second instead of 250. Their time is the point that they were woken
 * for and not when that came to pass, so what a packet's time is reckoned from has no jitter in it.
 * And a thread that is waited for is woken.
 *
 * The names of what is replaced are baresip's and C11's. This library is loaded before all others
 * (LD_PRELOAD, sip_pace.py). Without it nothing is missing but the processor's time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define NS_PER_MS 1000000ll
#define NS_PER_S 1000000000ll

/* Of the grid. */
#define STEP_NS (10 * NS_PER_MS)

/* What a sender asks to sleep, and nobody else does. */
#define SENDER_US 4000

/* Groups of threads wake one after the other, 1 ms apart: a hundred at once would keep both of two
 * processors for 2 ms. A sender wakes 2 to 8 ms after what feeds it, of whatever groups they are,
 * because one that finds nothing to send leaves a packet out. */
#define GROUPS 4
#define SENDERS_AFTER_NS (5 * NS_PER_MS)

/* How often a sender that has been woken looks whether a packet is due, one look after the other:
 * as often as it would have in 10 ms by itself. With one look it could never send packets of 5 ms
 * as fast as they are due, nor catch up with those of 10 ms once it was late. */
#define LOOKS 3

/* A thread that has slept, for whoever waits for its end. */
struct sleeper {
	pthread_t thread;
	sem_t wanted;
	int64_t phase_ns;
	int64_t woken_for_ns;
	int is_sender;
	int looks; /* that are left before it sleeps again */
	struct sleeper *next;
};

static _Thread_local struct sleeper self;
static _Thread_local int is_known;

static struct sleeper *sleepers;
static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t at_end;

static void forget(void *ended)
{
	struct sleeper **at = &sleepers;

	pthread_mutex_lock(&sleepers_lock);
	while (*at && *at != ended)
		at = &(*at)->next;
	if (*at)
		*at = (*at)->next;
	pthread_mutex_unlock(&sleepers_lock);
}

static void begin(void)
{
	pthread_key_create(&at_end, forget);
}

static void know(unsigned int us)
{
	static atomic_uint senders, others;

	is_known = 1;
	self.thread = pthread_self();
	sem_init(&self.wanted, 0, 0);
	self.is_sender = us == SENDER_US;
	if (self.is_sender)
		self.phase_ns = SENDERS_AFTER_NS + atomic_fetch_add(&senders, 1) % GROUPS * NS_PER_MS;
	else
		self.phase_ns = atomic_fetch_add(&others, 1) % GROUPS * NS_PER_MS;
	pthread_once(&once, begin);
	if (pthread_setspecific(at_end, &self))
		return; /* it would not be forgotten: let it sleep to the end */
	pthread_mutex_lock(&sleepers_lock);
	self.next = sleepers;
	sleepers = &self;
	pthread_mutex_unlock(&sleepers_lock);
}

static int64_t read_ns(clockid_t clock)
{
	struct timespec at;

	clock_gettime(clock, &at);
	return at.tv_sec * NS_PER_S + at.tv_nsec;
}

/* The time of a thread that was woken less than a step ago is when it was to be woken. The clock
 * is the one baresip reckons with. */
static int64_t now_ns(int64_t really_ns)
{
	if (is_known && really_ns - self.woken_for_ns < STEP_NS)
		return self.woken_for_ns;
	return really_ns;
}

uint64_t tmr_jiffies(void)
{
	return (uint64_t)(now_ns(read_ns(CLOCK_MONOTONIC_RAW)) / NS_PER_MS);
}

void sys_usleep(unsigned int us)
{
	int64_t really_ns, until_ns, at_ns;
	struct timespec until;

	if (self.looks) {
		self.looks--;
		return;
	}
	really_ns = read_ns(CLOCK_MONOTONIC_RAW);
	until_ns = read_ns(CLOCK_MONOTONIC) - really_ns;
	at_ns = now_ns(really_ns) + us * 1000ll;
	if (!is_known)
		know(us);
	at_ns = (at_ns - self.phase_ns + STEP_NS - 1) / STEP_NS * STEP_NS + self.phase_ns;
	until_ns += at_ns;
	until.tv_sec = until_ns / NS_PER_S;
	until.tv_nsec = until_ns % NS_PER_S;
	while (sem_clockwait(&self.wanted, CLOCK_MONOTONIC, &until))
		if (errno != EINTR) {
			self.woken_for_ns = at_ns;
			self.looks = self.is_sender ? LOOKS - 1 : 0;
			return;
		}
}

int thrd_join(pthread_t thread, int *code)
{
	struct sleeper *one;
	void *returned;

	pthread_mutex_lock(&sleepers_lock);
	for (one = sleepers; one; one = one->next)
		if (pthread_equal(one->thread, thread))
			sem_post(&one->wanted);
	pthread_mutex_unlock(&sleepers_lock);
	if (pthread_join(thread, &returned))
		return 2; /* thrd_error */
	if (code)
		*code = (int)(intptr_t)returned;
	return 0;
}
